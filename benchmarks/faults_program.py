"""`zeroxla train`, with a fault planted in one process.

    python benchmarks/faults_program.py FLAG train [options of zeroxla train]

Process 1 does what the file FLAG says, and removes it. "kill": it is killed in the middle of its
next forward, between two layers of the model, by a callback of the compiled program. A word of
IN_LOOP: in its training loop, before the next step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import zeroxla.cli.train.model
import zeroxla.step.make
from zeroxla import models
from zeroxla.cli.main import main
from zeroxla.step.step import Step


class GPT(models.GPT):
    """The model of `zeroxla train`, which may be killed between its layers and its last norm."""

    def _blocks(self, x_BLD: jax.Array, *args: Any) -> jax.Array:
        x_BLD = super()._blocks(x_BLD, *args)
        jax.debug.callback(kill_if_told, x_BLD[0, 0, 0])
        return x_BLD


def kill_if_told(value: Any) -> None:
    if told("kill"):
        os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("a mistake of the program")


IN_LOOP: dict[str, Callable[[], None]] = {
    "raise": fail,
    "exit": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(3600),
}


class FailingStep(Step):
    """The step of `zeroxla train`, before which its process may fail."""

    def __call__(self, *args: Any) -> Any:
        for word, action in IN_LOOP.items():
            if told(word):
                action()
        return super().__call__(*args)


def told(word: str) -> bool:
    """Return whether the flag asks this process for a fault; lower it then."""
    flag = Path(sys.argv[1])
    asked = jax.process_index() == 1 and flag.exists() and flag.read_text() == word
    if asked:
        flag.unlink()
    return asked


if __name__ == "__main__":
    zeroxla.cli.train.model.GPT = GPT
    zeroxla.step.make.Step = FailingStep
    sys.exit(main(sys.argv[2:]))
