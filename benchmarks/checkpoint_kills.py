"""Kill -9 at 20 random moments of saving and training: does every restart find a good checkpoint?

`zeroxla train` of a byte-level GPT of 3.3 million parameters on 8 simulated devices saves every
third step, in the background. It is killed 20 times: every other time while a checkpoint is being
written (its temporary folder is there), else at any moment of training; each time after a random
delay. After each kill it is started again with --resume, and after the last one it runs to its end.
Every loss must be bit for bit that of a run that nothing disturbed.

    python benchmarks/checkpoint_kills.py [--kills 20] [--seed 0]

Exits with 1 if a target is missed; writes results/checkpoint_kills.json and .md. Takes about 8
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Check, report, table

STEPS, SAVE_EVERY = 120, 3
TMP = "*.orbax-checkpoint-tmp*"
TRAIN = [
    *("--steps", STEPS, "--save-every", SAVE_EVERY, "--eval-every", STEPS, "--eval-batches", 2),
    *("--batch", 8, "--length", 64, "--sample-bytes", 0, "--keep", 2),
]


class Run:
    """One training, in a folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self._cache = folder, cache

    def start(self, *, resume: bool) -> subprocess.Popen[str]:
        """Start it, or start it again."""
        told = ["--resume"] if resume else [*map(str, TRAIN)]
        return subprocess.Popen(
            [sys.executable, "-m", "zeroxla", "train", "--run", str(self.folder), *told],
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self._cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def losses(self) -> dict[int, float]:
        """Return the recorded loss of each step."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        values = [json.loads(line) for line in lines if line.endswith("}")]
        return {x["step"]: x["loss"] for x in values if "loss" in x}

    def checkpoints(self) -> list[int]:
        """Return the steps of the checkpoints that are whole."""
        found = (self.folder / "checkpoints").glob("*")
        return sorted(int(path.name) for path in found if path.name.isdigit())

    def is_saving(self) -> bool:
        return any((self.folder / "checkpoints").glob(TMP))


def kill(run: Run, process: subprocess.Popen[str], chance: random.Random, *, saving: bool) -> Any:
    """Kill a run at a random moment; return what it was doing."""
    began = max(run.losses(), default=0)
    # The first kill waits for a checkpoint: before it there is nothing to go on from.
    while not run.checkpoints() or max(run.losses(), default=0) < began + chance.randint(1, 3):
        if process.poll() is not None:
            raise RuntimeError(f"the run has ended by itself:\n{process.communicate()[0]}")
        time.sleep(0.005)
    if saving:
        while not run.is_saving() and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.3))
    else:
        time.sleep(chance.uniform(0, 0.5))
    if process.poll() is not None:
        raise RuntimeError("the run has ended before it was killed; take more steps")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = [path.name for path in (run.folder / "checkpoints").glob(TMP)]
    return {"step": max(run.losses()), "left": left, "whole": run.checkpoints()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill -9 at random moments.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Run(Path(name) / "undisturbed", Path(name) / "cache")
        out, _ = undisturbed.start(resume=False).communicate()
        expected = undisturbed.losses()
        if len(expected) != STEPS:
            raise RuntimeError(f"the undisturbed run has failed:\n{out}")
        run = Run(Path(name) / "run", Path(name) / "cache")
        process, kills = run.start(resume=False), []
        for number in range(options.kills):
            kills.append(kill(run, process, chance, saving=number % 2 == 0))
            print(f"kill {number + 1}: {kills[-1]}", flush=True)
            process = run.start(resume=True)
        out, _ = process.communicate()
        found = run.losses()
    return write(kills, expected, found, process.returncode, out)


def write(kills: list[dict[str, Any]], expected: Any, found: Any, status: int, out: str) -> int:
    """Write the results."""
    wrong = [step for step in expected if found.get(step) != expected[step]]
    passed_over = len(re.findall("damaged and passed over", out))
    lines = [
        [
            number + 1,
            one["step"],
            ", ".join(one["left"]) or "",
            ", ".join(map(str, one["whole"])),
            one["step"] - one["whole"][-1],
        ]
        for number, one in enumerate(kills)
    ]
    header = ["kill", "after step", "half written", "whole", "steps to take again"]
    body = (
        f"`zeroxla train` of {STEPS} steps with a checkpoint every {SAVE_EVERY}, killed "
        f"{len(kills)} times; each restart goes on from the newest whole checkpoint.\n\n"
        f"{table(header, lines)}"
    )
    in_writing = sum(bool(one["left"]) for one in kills)
    checks = [
        Check(name="restarts that did not go on", value=float(status != 0), limit=0),
        Check(name="steps with another loss than undisturbed", value=len(wrong), limit=0),
        Check(
            name="kills that met no write", value=len(kills) - in_writing, limit=len(kills) * 0.7
        ),
    ]
    figures = {
        "kills": kills,
        "passed over": passed_over,
        "final loss": found.get(STEPS),
        "undisturbed": expected[STEPS],
    }
    title = "Kill -9 at random moments"
    return report("checkpoint_kills", title, body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
