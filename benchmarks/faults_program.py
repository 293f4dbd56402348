"""`zeroxla train`, with a fault planted in the forward of one process.

    python benchmarks/faults_program.py FLAG train [options of zeroxla train]

While the file FLAG exists, process 1 is killed in the middle of its next forward: between two
layers of the model, by a callback of the compiled program.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax

import zeroxla.cli.train.model
from zeroxla import models
from zeroxla.cli.main import main


class GPT(models.GPT):
    """The model of `zeroxla train`, which may be killed between its layers and its last norm."""

    def _blocks(self, x_BLD: jax.Array, mask_BL: Any, train: bool) -> jax.Array:
        x_BLD = super()._blocks(x_BLD, mask_BL, train)
        jax.debug.callback(kill_if_told, x_BLD[0, 0, 0])
        return x_BLD


def kill_if_told(value: Any) -> None:
    flag = Path(sys.argv[1])
    if jax.process_index() == 1 and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    zeroxla.cli.train.model.GPT = GPT
    sys.exit(main(sys.argv[2:]))
