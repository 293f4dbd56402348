"""Measures what training loses when islands are killed or cut off, or the coordinator is gone.

Islands are processes on hosts of their own, see faults_islands_network.py, and so is the
coordinator. They train a small language model twice for the same time: once undisturbed, once while
an island is killed with SIGKILL every few seconds, a cable is pulled out twice, and the coordinator
is killed twice. Who is killed is started again at once, without a checkpoint.

    python benchmarks/faults_islands.py [--minutes 10] [--every 20] [--islands 4]

A step takes `--step-s` seconds, and an island sleeps for most of them. So the islands do not
compete for this machine's cores, as islands on hosts of their own would not. Needs root; takes
2 x MINUTES and 3 more. Writes results/faults_islands.json, .md and .png; exits with 1 if a target
is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS
from faults_islands_figures import Disturbance, Found, disturbances
from faults_islands_loss import losses_of
from faults_islands_network import Network, switched
from faults_islands_picture import draw
from faults_islands_report import write
from faults_islands_run import Run, RunError
from faults_islands_task import EVERY, FRAGMENTS, LENGTH, ROWS, Task
from network import NetworkError
from rich.console import Console
from rich.progress import Progress

from zeroxla.cli.data.text import load_corpus

PORT = 29500
RATE = "20mbit"
WARM_TURNS = 4
"""Length of the run that compiles all programs, in turns of all fragments. An island is killed in
it, so that the programs of one that comes back are compiled too."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Islands that are killed and cut off.")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each run")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.25, help="seconds of a step")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds, the coordinator's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keeps logs and compiled programs; else removed")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    planned = disturbances(seconds, options.every, options.islands, options.deadline, options.seed)
    console = Console(stderr=True)
    try:
        with _folder(options.work) as work, switched(options.islands + 1, RATE) as network:
            _write_corpus(work)
            with Progress(console=console) as progress:
                turn = EVERY * options.step_s
                kill = Disturbance(at=1.5 * turn, kind="kill", slot=0, phase="computing")
                _run("warm", WARM_TURNS * turn, [kill], options, work, network, progress, True)
                calm = _run("undisturbed", seconds, [], options, work, network, progress)
                found = _run("disturbed", seconds, planned, options, work, network, progress)
            runs = {"undisturbed": calm, "disturbed": found}
            evaluated = losses_of(runs, work, options.seed)
    except (NetworkError, RunError) as error:
        sys.exit(f"error: {error}")
    RESULTS.mkdir(exist_ok=True)
    draw(RESULTS / "faults_islands.png", *evaluated.values(), options.islands)
    return write(evaluated["undisturbed"], evaluated["disturbed"], vars(options))


def _run(
    name: str,
    seconds: float,
    planned: list[Disturbance],
    options: argparse.Namespace,
    work: Path,
    network: Network,
    progress: Progress,
    patient: bool = False,
) -> Found:
    """Train once; return what was seen, without the losses."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    task = Task(
        folder=str(folder),
        corpus=str(work / "train.npy"),
        compiled=str(work / "compiled"),
        coordinator=f"{network.hosts[-1].address}:{PORT}",
        deadline=options.deadline,
        islands=options.islands,
        step_s=options.step_s,
        seed=options.seed,
    )
    bar = progress.add_task(name, total=seconds)
    run = Run(network, task)
    try:
        began, ended = run.train(
            seconds,
            planned,
            lambda at: progress.update(bar, completed=at),
            patient=patient,
        )
    finally:
        (folder / "events.json").write_text(json.dumps(run.events))
    progress.update(bar, completed=seconds)
    hashes = [json.loads(x) for f in sorted(folder.glob("hashes-*")) for x in f.open()]
    return Found(
        seconds=ended - began,
        events=[_since(began, event) for event in run.events],
        hashes=[_since(began, line) for line in hashes],
        losses=(),
        rows=ROWS,
        length=LENGTH,
        fragments=FRAGMENTS,
    )


def _since(began: float, event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "at": event["at"] - began}


def _write_corpus(work: Path) -> None:
    corpus = load_corpus()
    np.save(work / "train.npy", corpus.train)
    np.save(work / "valid.npy", corpus.valid)


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    if work is None:
        with tempfile.TemporaryDirectory() as found:
            yield Path(found)
    else:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()


if __name__ == "__main__":
    sys.exit(main())
