"""Training over a slow network: zeroxla, plain jit FSDP, PyTorch and DeepSpeed, in turns.

Two hosts of two devices, network namespaces on this machine joined by a link whose rate is set and
whose bytes are counted (network.py). Every row trains the same GPT (peers/task.py) and takes turns
with the others at every rate, so that what else the machine does falls on all. Needs root; leaves
nothing behind, however it ends.

    python benchmarks/two_hosts.py [--rates 0 10gbit 1gbit 100mbit] [--rows zero3 zeropp ...]
        [--peers ENVIRONMENT/bin/python] [--rounds 3] [--steps 2]

With --peers, the rows of PyTorch and DeepSpeed are in the same run; `make peers` makes their
environment and runs this with it. Writes results/two_hosts.json, .md and .png if all rates and our
rows were measured, and exits with 1 if a target is missed. Takes 8 minutes on 2 cores; 25 with
peers, who need 12 GB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common import report
from fleet import Steps, WorkerError, fleet
from network import Host, NetworkError, two_hosts
from peers import task
from peers.fleets import fleets
from peers.rows import ROWS as PEER_ROWS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from two_hosts_report import OURS, PEER, Line, body, draw, tables, targets
from two_hosts_rows import ROWS, program_bytes

import zeroxla

WORKER = Path(__file__).with_name("two_hosts_worker.py")
PORT = 29400
RATES = ("0", "10gbit", "1gbit", "100mbit")

Take = Callable[[int], Steps]
"""Have a row take steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Training over a slow network.")
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="0: unbounded")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW")
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with peers/requirements.txt")
    parser.add_argument("--rounds", type=int, default=3, help="turns of a row at a rate")
    parser.add_argument("--steps", type=int, default=2, help="in a turn")
    options = parser.parse_args()
    if options.peers:  # workers run elsewhere; links are kept, they are what makes an environment
        options.peers = os.path.abspath(options.peers)
    try:
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(two_hosts())
            argv = [sys.executable, str(WORKER), "--port", str(PORT)]
            ours = stack.enter_context(fleet(hosts, argv))
            rows = {name: functools.partial(ours.take, name) for name in options.rows}
            if options.peers:
                peers = stack.enter_context(fleets(hosts, options.peers))
                rows |= {
                    row.label: functools.partial(peers.take, name)
                    for name, row in PEER_ROWS.items()
                }
            taken = measure(rows, hosts, options.rates, options.rounds, options.steps)
    except (NetworkError, WorkerError) as error:
        sys.exit(f"error: {error}")
    lines = make_lines(taken)
    if set(options.rates) < set(RATES) or set(options.rows) < set(ROWS):
        print(tables(lines), *targets(lines), sep="\n")
        return 0
    draw(lines)
    figures = {"rows": {label: dataclasses.asdict(line) for label, line in lines.items()}}
    text = body(lines, rounds=options.rounds, steps=options.steps)
    return report("two_hosts", "Training over a slow network", text, figures, targets(lines))


def measure(
    rows: Mapping[str, Take], hosts: Sequence[Host], rates: Sequence[str], rounds: int, steps: int
) -> dict[str, dict[str, Steps]]:
    """Have rows take turns at every rate.

    Args:
      rows: by label.
      hosts: whose rate is set, and left at the last.
      rates: of `Host.set_rate`; "0" for no bound.
      rounds: turns of a row at a rate.
      steps: of a turn.

    Returns:
      By label, then rate, all steps of all rounds.
    """
    taken: dict[str, dict[str, Steps]] = {label: {} for label in rows}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("compiling", total=len(rows) * (1 + len(rates) * rounds))
        for label, take in rows.items():
            progress.update(bar, description=f"{label}, compiling", advance=1)
            take(1)
        for rate in rates:
            for host in hosts:
                host.set_rate(None if rate == "0" else rate)
            turns: dict[str, list[Steps]] = {label: [] for label in rows}
            for _ in range(rounds):
                for label, take in rows.items():
                    progress.update(bar, description=f"{label}, {rate}", advance=1)
                    turns[label].append(take(steps))
            for label in rows:
                taken[label][rate] = joined(turns[label])
    return taken


def joined(turns: Sequence[Steps]) -> Steps:
    """Return turns of equally many steps as one."""
    return Steps(
        seconds=[second for turn in turns for second in turn.seconds],
        losses=[loss for turn in turns for loss in turn.losses],
        sent_bytes=statistics.fmean(turn.sent_bytes for turn in turns),
    )


def make_lines(taken: Mapping[str, Mapping[str, Steps]]) -> dict[str, Line]:
    """Return what was measured with what should be sent, by label."""
    zeroxla.simulate(task.WORLD)
    mesh = zeroxla.make_mesh(nodes=task.HOSTS)
    peers = {row.label: row for row in PEER_ROWS.values()}
    lines = {}
    for label, by_rate in taken.items():
        if label in peers:
            row, side = peers[label], PEER
            ideal, program = row.ideal_bytes, row.over_gloo_bytes
        else:
            row, side = ROWS[label], OURS
            program = program_bytes(label, mesh)
            ideal = program if row.ideal is None else row.ideal * 4 * task.num_parameters()
        lines[label] = Line(
            label=label,
            description=row.description,
            side=side,
            sharded=row.sharded,
            ideal_bytes=ideal,
            program_bytes=program,
            by_rate=by_rate,
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
