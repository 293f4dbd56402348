"""A schedule as the tables that a device reads: in each tick its op, its micro-batch, its slots.

If no rank ever does two ops in a tick, all ops are branches of one conditional. Otherwise each kind
of op has a conditional of its own, so that what one sends travels beside the next. So it has if
forwards leave tapes: XLA copies a ring that one branch writes and another one reads.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from zeroxla.pipeline.schedule import NONE, OPS, Schedule
from zeroxla.pipeline.stash import Stash

RINGS = ("input", "gradient", "kept", "tape")
"""What a rank keeps in slots."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TickPhase:
    """One conditional of a tick. Tables are int32 [ticks, ranks].

    Attributes:
      ops: the kinds of its ops.
      branches: the ops, each with its stage.
      branch: which of them a rank does; 0 for none, and 1 + its number for a branch.
      microbatch: the micro-batch.
      input_slot, gradient_slot: where its input lies, and the gradient of its output.
      kept_slot: where a backward leaves, and a weight gradient finds, what the latter needs.
      tape_slot: where a forward leaves, and a backward finds, what the latter needs.
    """

    ops: tuple[str, ...]
    branches: tuple[tuple[str, int], ...]
    branch: np.ndarray
    microbatch: np.ndarray
    input_slot: np.ndarray
    gradient_slot: np.ndarray
    kept_slot: np.ndarray
    tape_slot: np.ndarray

    @staticmethod
    def make(ops: Sequence[str], schedule: Schedule, stash: Stash) -> TickPhase:
        """Collect the ops of some kinds."""
        shape = schedule.ticks, schedule.num_ranks
        names = ("branch", "microbatch", *(f"{name}_slot" for name in RINGS))
        tables = {name: np.zeros(shape, np.int32) for name in names}
        branches = []
        for op in ops:
            table = getattr(schedule, op)
            for stage, rank in enumerate(schedule.ranks):
                ticks = np.flatnonzero(table[:, stage] != NONE)
                if not len(ticks):
                    continue
                branches.append((op, stage))
                done = table[ticks, stage]
                tables["branch"][ticks, rank] = len(branches)
                tables["microbatch"][ticks, rank] = done
                for name in RINGS:
                    slots = getattr(stash, f"{name}_slots")[stage, done]
                    tables[f"{name}_slot"][ticks, rank] = np.maximum(slots, 0)
        return TickPhase(ops=tuple(ops), branches=tuple(branches), **tables)

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """The tables, by name."""
        names = ("branch", "microbatch", *(f"{name}_slot" for name in RINGS))
        return {name: getattr(self, name) for name in names}


def make_phases(schedule: Schedule, stash: Stash, *, tapes: bool) -> tuple[TickPhase, ...]:
    """Return the conditionals of a tick, in order.

    Args:
      schedule, stash: the schedule, and its slots.
      tapes: whether forwards leave tapes.
    """
    ops = [op for op in OPS if (getattr(schedule, op) != NONE).any()]
    groups = [ops] if schedule.one_op and not tapes else [[op] for op in ops]
    return tuple(TickPhase.make(group, schedule, stash) for group in groups)


def pairs_of(schedule: Schedule, hop: int, *, down: bool) -> list[tuple[int, int]]:
    """Return the pairs (sender, receiver) of ranks between which activations, or gradients, go.

    Args:
      schedule: the schedule.
      hop: how many ranks on the receiver is, modulo the number of ranks.
      down: whether activations go, from a stage to the next one; else gradients, to the one before.
    """
    ranks, count = schedule.ranks, schedule.num_ranks
    steps = itertools.pairwise(ranks if down else ranks[::-1])
    return sorted({(a, b) for a, b in steps if (b - a) % count == hop})
