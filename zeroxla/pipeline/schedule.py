"""Schedules as tables: which stage works on which micro-batch in which tick.

A rank is an index of the mesh axis `pipe`. It runs one stage, or several, which are its chunks. All
ranks advance tick by tick. Within one tick a rank may do a forward, then a backward, then a weight
gradient, each of any of its stages. The neighbours have the results in the next tick: the stage
after has the activations, the stage before has the gradients, also on the same rank.
"""

from __future__ import annotations

import dataclasses

import numpy as np

NONE = -1
OPS = ("forward", "backward", "weight")
"""The tables of a schedule, in the order in which a rank works within a tick."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Tables int32 [ticks, stages] of micro-batches; -1 means none.

    `make_schedule` builds one, or you write one by hand; `check` proves that it can run.

    Attributes:
      name: the name that reports show.
      stages: the number of stages, of all ranks together, at least 1.
      microbatches: the number of micro-batches, at least 1.
      forward: the micro-batch whose forward a stage does.
      backward: the micro-batch whose backward a stage does. It is the whole backward, or the
        gradient of the stage's input alone if `weight` has entries. A table without entries makes
        a schedule for evaluation.
      weight: the micro-batch for which a stage does the gradient of its leaves.
      ranks: for each stage, the rank that runs it. None puts stage s on rank s.
      stash_bound: for each rank, the most inputs that it may hold at a time, one for each
        micro-batch of each of its stages; None sets no bound.

    Raises:
      ValueError: a number, a shape or an entry is out of range.
    """

    name: str
    stages: int
    microbatches: int
    forward: np.ndarray = dataclasses.field(repr=False)
    backward: np.ndarray = dataclasses.field(repr=False)
    weight: np.ndarray = dataclasses.field(repr=False)
    ranks: tuple[int, ...] = None  # pyright: ignore[reportAssignmentType]
    stash_bound: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(self.stages, self.microbatches)
        object.__setattr__(self, "ranks", self._ranks())
        for field in OPS:
            object.__setattr__(self, field, self._table(field))
        if self.stash_bound is not None and len(self.stash_bound) != self.num_ranks:
            kind = "stage" if self.num_chunks == 1 else "rank"
            raise ValueError(
                f"schedule {self.name!r} has {self.num_ranks} {kind}s and "
                f"{len(self.stash_bound)} stash bounds; give one for each {kind}, or None"
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

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    @property
    def num_chunks(self) -> int:
        """The most stages of a rank."""
        return max(len(self.stages_of(rank)) for rank in range(self.num_ranks))

    @property
    def one_op(self) -> bool:
        """Whether no rank ever does more than one op in a tick."""
        done = np.zeros((self.ticks, self.num_ranks), int)
        for op in OPS:
            for stage, rank in enumerate(self.ranks):
                done[:, rank] += getattr(self, op)[:, stage] != NONE
        return bool((done <= 1).all())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order: its chunks."""
        return tuple(stage for stage, other in enumerate(self.ranks) if other == rank)

    def cannot_run(self, wrong: str, remedy: str) -> ValueError:
        """Return the error that says why this schedule cannot run."""
        return ValueError(f"schedule {self.name!r} cannot run: {wrong}; {remedy}")

    def _ranks(self) -> tuple[int, ...]:
        """Check the ranks of the stages; return them."""
        if self.ranks is None:
            return tuple(range(self.stages))
        ranks = tuple(int(rank) for rank in self.ranks)
        if len(ranks) != self.stages:
            raise ValueError(
                f"schedule {self.name!r} has {self.stages} stages and {len(ranks)} ranks of "
                "stages; give one for each stage, or None"
            )
        empty = sorted({*range(max(ranks) + 1)} - {*ranks})
        if empty or min(ranks) < 0:
            wrong = f"rank {empty[0]} has no stage" if empty else f"there is no rank {min(ranks)}"
            raise ValueError(
                f"schedule {self.name!r}: {wrong} in ranks={ranks}; number the ranks from 0 and "
                "give each a stage"
            )
        return ranks

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
