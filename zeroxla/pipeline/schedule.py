"""Schedules as tables: which stage works on which micro-batch in which tick.

All stages advance tick by tick. Within one tick a stage may do a forward, then a backward, then a
weight gradient. Its neighbours have the results in the next tick: the stage after it has its
activations, the stage before it has its gradients.
"""

from __future__ import annotations

import dataclasses

import numpy as np

NONE = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Tables int32 [ticks, stages] of micro-batches; -1 means none.

    `make_schedule` builds one, or you write one by hand; `check` proves that it can run.

    Attributes:
      name: the name that reports show.
      stages: the number of stages, at least 1.
      microbatches: the number of micro-batches, at least 1.
      forward: the micro-batch whose forward a stage does.
      backward: the micro-batch whose backward a stage does. It is the whole backward, or the
        gradient of the stage's input alone if `weight` has entries. A table without entries makes
        a schedule for evaluation.
      weight: the micro-batch for which a stage does the gradient of its leaves.
      stash_bound: for each stage, the most micro-batches that it may hold at a time; None sets no
        bound.

    Raises:
      ValueError: a number, a shape or an entry is out of range.
    """

    name: str
    stages: int
    microbatches: int
    forward: np.ndarray = dataclasses.field(repr=False)
    backward: np.ndarray = dataclasses.field(repr=False)
    weight: np.ndarray = dataclasses.field(repr=False)
    stash_bound: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(self.stages, self.microbatches)
        for field in ("forward", "backward", "weight"):
            object.__setattr__(self, field, self._table(field))
        if self.stash_bound is not None and len(self.stash_bound) != self.stages:
            raise ValueError(
                f"schedule {self.name!r} has {self.stages} stages and {len(self.stash_bound)} "
                "stash bounds; give one for each stage, or None"
            )

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.forward)

    @property
    def trains(self) -> bool:
        """Whether there is any backward or weight gradient."""
        return bool((self.backward != NONE).any() or self.splits)

    @property
    def splits(self) -> bool:
        """Whether weight gradients have entries of their own."""
        return bool((self.weight != NONE).any())

    def _table(self, field: str) -> np.ndarray:
        """Check a table; return it as read-only int32."""
        given = np.asarray(getattr(self, field))
        shape = (len(self.forward), self.stages)
        if given.shape != shape or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(
                f"schedule {self.name!r}: table {field!r} is {given.dtype} {list(given.shape)}; "
                f"make it int32 [ticks, stages] = {list(shape)}, like 'forward'"
            )
        wrong = np.argwhere((given < NONE) | (given >= self.microbatches))
        if len(wrong):
            tick, stage = wrong[0].tolist()
            raise ValueError(
                f"schedule {self.name!r}: {field} of micro-batch {given[tick, stage]} on stage "
                f"{stage} at tick {tick}, but there are {self.microbatches}; use 0 to "
                f"{self.microbatches - 1}, or {NONE} for none"
            )
        table = given.astype(np.int32)  # a copy, so that it can be made read-only
        table.flags.writeable = False
        return table


def ticks_of(table: np.ndarray, microbatches: int) -> np.ndarray:
    """Return the tick of each micro-batch on each stage, int32 [stages, microbatches], -1 for none.

    This inverts a table in which no stage has a micro-batch twice.
    """
    when = np.full((table.shape[1], microbatches), NONE, np.int32)
    tick, stage = np.nonzero(table != NONE)
    when[stage, table[tick, stage]] = tick
    return when


def check_sizes(stages: int, microbatches: int) -> None:
    """Check the two numbers of a schedule.

    Raises:
      ValueError: there is not at least one stage and one micro-batch.
    """
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a schedule cannot have {stages} stages and {microbatches} micro-batches; "
            "use at least 1 of each"
        )
