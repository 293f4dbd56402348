"""`Feed`: draws a run's batches, and puts them on the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zeroxla.cli.phase_seconds import PhaseSeconds
from zeroxla.cli.train.targets import weight_of
from zeroxla.cli.train.task import Task
from zeroxla.mesh.batches import process_shard
from zeroxla.program.shapes import shapes_of
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


class Feed:
    """The training and validation batches of a run.

    A process draws its own rows of every training batch; but all of them if the task completes
    batches with the state, for which all processes pass the same rows.

    Args:
      task: the model and its data.
      step: the run's step. It is traced, so that what does not fit the devices is found.
      slot: the number of the island whose data to draw.

    Attributes:
      batches: the iterator over the training batches.
      shapes: the shapes of a state of the step.
      example: the shapes of a batch that the step's state can be made for.
      weights: for each validation batch the number of things that its loss is a mean over.
    """

    def __init__(self, task: Task, step: Step, slot: int = 0) -> None:
        self._step, self._part = step, process_shard(step.mesh)
        self._valid = list(task.validation())
        self._scorer = task.scorer(step)
        self.example: Any = (
            shapes_of(self._valid[0]) if self._scorer is None else self._scorer.shapes
        )
        self.shapes = step.abstract_state(self.example)
        self.weights = [weight_of(rows) for rows in self._valid]
        drawn = self._part if self._scorer is None else (0, 1)
        self.batches = iter(task.training(*drawn, slot))

    def begin(self, state: TrainState, run: Path, *, resumed: bool) -> None:
        """Prepare for the first batch; see `Scorer.begin`."""
        if self._scorer is not None:
            self._scorer.begin(state, run, resumed=resumed)

    def next(self, state: TrainState, seconds: PhaseSeconds) -> Any:
        """Return the next training batch, on the mesh.

        Args:
          state: the state that the step is about to take.
          seconds: counts the seconds of "data", and of "score" if the batch is completed.
        """
        with seconds("data"):
            rows = next(self.batches)
        if self._scorer is not None:
            with seconds("score"):
                rows = self._own(self._scorer(state, rows))
        with seconds("data"):
            return self._step.place(rows)

    def validation(self, state: TrainState) -> list[Any]:
        """Return the validation batches, on the mesh. They are the same in the whole run."""
        valid = self._valid
        if self._scorer is not None:
            valid = [self._scorer(state, rows) for rows in valid]
        return [self._step.place(self._own(rows), train=False) for rows in valid]

    def _own(self, rows: Mapping[str, np.ndarray]) -> Any:
        """Return this process's part of a batch."""
        index, count = self._part
        return jax.tree.map(lambda x: np.split(x, count)[index], dict(rows))
