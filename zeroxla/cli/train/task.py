"""`Task`: a model that `zeroxla train` trains, with its data and its ways to show results.

`job.py` is the same for all of them. Each task is a class that fulfils the protocol `Task`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from zeroxla.cli.run_folder import NoRunFolder, RunFolder
from zeroxla.cli.train.output import Output
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

if TYPE_CHECKING:
    import grain


class Scorer(Protocol):
    """Completes batches with what follows from the state, and not from the data alone.

    It must not change in training: validation batches are completed once.

    Attributes:
      shapes: the shapes of a completed batch.
    """

    shapes: Any

    def begin(self, state: TrainState, run: Path, *, resumed: bool) -> None:
        """Prepare for the first batch.

        Args:
          state: the state that the run begins with.
          run: the run's folder, in which it finds what it needs if the run is resumed.
          resumed: whether it is.
        """
        ...

    def __call__(self, state: TrainState, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a completed batch; all processes pass all of its rows."""
        ...


class Task(Protocol):
    """A model and its data.

    Attributes:
      model: the model, as `make_step` takes it; a `Pipeline` if there are stages.
      loss: its loss, as `make_step` takes it; None if it is the model's own.
      data: one word for the data. config.json has its record under this name.
      unit: one word for the unit of the loss, which is nats per unit.
      counted: one word for the things that are counted per second.
      num_counted: the number of these things in a step.
      numbers: the model's metrics besides the loss that are numbers of any size.
      metrics: those that are shares between 0 and 1.
      guess: the loss of the best guess that does not look at the input, on the validation set.
      guess_name: words for that loss.
    """

    model: Any
    loss: Any
    data: str
    unit: str
    counted: str
    num_counted: int
    numbers: tuple[str, ...]
    metrics: tuple[str, ...]
    guess: float
    guess_name: str

    @property
    def source(self) -> str:
        """A sentence about the data that was read."""
        ...

    def record(self) -> dict[str, Any]:
        """Return the facts about the data that a resumed run must find unchanged; they go into
        config.json, and one is called "fingerprint"."""
        ...

    def training(self, index: int, count: int, slot: int = 0) -> grain.IterDataset:
        """Return part `index` of `count` of the training batches, in the order of an island."""
        ...

    def validation(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the validation batches, whole and always the same."""
        ...

    def scorer(self, step: Step) -> Scorer | None:
        """Return what completes each batch with the state before it is placed; None if batches are
        whole as they are drawn. With a scorer every process draws all rows of a batch."""
        ...

    def keep(self, run: Path) -> None:
        """Write the files that resuming and exporting need besides the options into the run's
        folder."""
        ...

    def begin(self, step: Step, key: jax.Array) -> TrainState | None:
        """Return a state with the weights of --init; None if the weights are to be drawn."""
        ...

    def show(
        self, step: Step, state: TrainState, folder: RunFolder | NoRunFolder, output: Output
    ) -> None:
        """Print an example of the trained model's work, and write it into the folder.

        All processes take part."""
        ...
