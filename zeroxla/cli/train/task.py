"""What `zeroxla train` can train: a model, the data that it learns from, and what it can show.

The job (train.py) is the same for all of them; each is a `Task`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import numpy as np

from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.cli.train.images import ImageTask
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.output import Output
from zeroxla.cli.train.text import TextTask
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class Task(Protocol):
    """A model and its data.

    Attributes:
      model: what `make_step` takes: of a mesh with stages a `Pipeline`.
      data: what the model learns from, in a word; config.json has its record under it.
      unit: of the loss, in a word.
      counted: what passes by in a second, in a word.
      num_counted: of them in a step.
      metrics: of the model, besides the loss: shares between 0 and 1.
      guess: the loss of the best guess that does not look at the input, on the validation set.
      guess_name: what that is, in words.
    """

    model: Any
    data: str
    unit: str
    counted: str
    num_counted: int
    metrics: tuple[str, ...]
    guess: float
    guess_name: str

    @property
    def source(self) -> str:
        """What was read, in a sentence."""
        ...

    def record(self) -> dict[str, Any]:
        """Return what a resumed run must find the same, for config.json."""
        ...

    def training(self, index: int, count: int) -> grain.IterDataset:
        """Return part `index` of `count` of the training batches."""
        ...

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the validation batches, whole and always the same."""
        ...

    def keep(self, run: Path) -> None:
        """Write into the run's folder what resuming and exporting need besides its options."""
        ...

    def begin(self, step: Step, key: jax.Array) -> TrainState | None:
        """Return a state with weights that are there already; None if there are none."""
        ...

    def show(
        self, step: Step, state: TrainState, folder: RunFolder | NoRunFolder, output: Output
    ) -> None:
        """Print what the trained model does with an input of the user's or of the validation set,
        and write it into the folder. All processes take part."""
        ...


def make_task(options: TrainOptions, run: Path | None) -> Task:
    """Return what a run trains.

    Args:
      options: of the run.
      run: its folder, if there is one already.

    Raises:
      ImportError: a package that the options need is not installed.
      ValueError: an option or an input cannot work.
    """
    if options.model.model == "alexnet":
        return ImageTask(options)
    return TextTask(options, run)
