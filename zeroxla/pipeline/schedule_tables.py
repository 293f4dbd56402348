"""Makes the tables of a schedule, from ticks or from the order in which each rank works."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from zeroxla.pipeline.schedule import NONE, OPS, Schedule, check_sizes

Entry = tuple[tuple[str, int], ...]
"""What a rank does in one tick: ops, each with its stage. Their micro-batches come in order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Fills ticks in which a rank would wait with weight gradients.

    Attributes:
      put_off: a rank waits with a backward while it has put off so many weight gradients.
      held: it waits with a forward while it has done so many without their weight gradients.
    """

    put_off: int
    held: int


def grid(stages: int, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the stages [stages, 1] and the micro-batches [1, microbatches], to be broadcast."""
    check_sizes(stages, microbatches)
    return np.arange(stages)[:, None], np.arange(microbatches)[None, :]


def from_ticks(
    name: str,
    *,
    forward: np.ndarray,
    backward: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    ranks: Sequence[int] | None = None,
    bound: Sequence[int],
) -> Schedule:
    """Make a schedule from the tick of each micro-batch on each stage, [stages, microbatches].

    Args:
      name: the schedule's name.
      forward, backward, weight: the ticks of these ops.
      ranks: for each stage, the rank that runs it; None puts stage s on rank s.
      bound: for each rank, the most inputs that it may hold, or all if those are fewer.
    """
    stages, m = forward.shape
    ranks = tuple(range(stages)) if ranks is None else tuple(ranks)
    ticks = 1 + max(int(when.max()) for when in (forward, backward, weight) if when is not None)
    tables = []
    for when in (forward, backward, weight):
        table = np.full((ticks, stages), NONE, np.int32)
        if when is not None:
            table[when, np.arange(stages)[:, None]] = np.arange(m)[None, :]
        tables.append(table)
    return Schedule(
        name=name,
        stages=stages,
        microbatches=m,
        forward=tables[0],
        backward=tables[1],
        weight=tables[2],
        ranks=ranks,
        stash_bound=tuple(min(most, m * ranks.count(rank)) for rank, most in enumerate(bound)),
    )


def place(
    orders: Sequence[Sequence[Entry]],
    ranks: Sequence[int],
    microbatches: int,
    *,
    fill: Fill | None = None,
) -> dict[str, np.ndarray]:
    """Put the entries of each rank into the earliest ticks in which what they need has arrived.

    Args:
      orders: for each rank its entries, which keep their order.
      ranks: for each stage, the rank that runs it.
      microbatches: the number of micro-batches.
      fill: None if the orders have weight gradients. Otherwise a rank does the oldest one wherever
        it would wait.

    Returns:
      By op, the tick of each micro-batch on each stage, [stages, microbatches].
    """
    stages = len(ranks)
    when = {op: [[NONE] * microbatches for _ in ranks] for op in OPS}
    done = {op: [0] * stages for op in OPS}
    waiting = [list(order)[::-1] for order in orders]  # the next entry is the last
    late = [deque[int]() for _ in orders]  # stages of weight gradients, the oldest first
    held = [0] * len(orders)
    tick = 0

    def before(op: str, stage: int, i: int) -> bool:
        return NONE < when[op][stage][i] < tick

    def ready(rank: int, entry: Entry) -> bool:
        for op, stage in entry:
            i = done[op][stage]
            if op == "forward":
                there = stage == 0 or before(op, stage - 1, i)
                there &= fill is None or held[rank] < fill.held
            elif op == "backward":
                there = before("forward", stage, i)
                there &= fill is None or len(late[rank]) < fill.put_off
                there &= stage == stages - 1 or before(op, stage + 1, i)
            else:
                there = ("backward", stage) in entry or before("backward", stage, i)
            if not there:
                return False
        return True

    while any(waiting) or any(late):
        moved = False
        for rank, order in enumerate(waiting):
            if order and ready(rank, order[-1]):
                entry = order.pop()
            elif late[rank]:
                entry = (("weight", late[rank].popleft()),)
            else:
                continue
            moved = True
            for op, stage in entry:
                when[op][stage][done[op][stage]] = tick
                done[op][stage] += 1
                held[rank] += (op == "forward") - (op == "weight")
                if op == "backward" and fill is not None:
                    late[rank].append(stage)
        assert moved, "the orders of two ranks wait for each other"
        tick += 1
    return {op: np.array(ticks) for op, ticks in when.items()}
