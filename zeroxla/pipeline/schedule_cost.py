"""The cost of a schedule: its critical path, in lockstep and without, and its share of idle time.

Work may have any unit; by default a forward is 1. It is the work of a rank for one micro-batch, in
all its stages: where ranks have several, an op of one stage costs that part of it. In a schedule
that splits backwards, the gradient of a stage's input costs `backward - weight` and the gradient of
its leaves `weight`. So the same three numbers compare all schedules.
"""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.schedule import NONE, OPS, Schedule
from zeroxla.pipeline.schedule_check import check


def work_of(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> np.ndarray:
    """Return the work of each op, float64 [ticks, ranks, 3]: forward, backward, weight gradient.

    Args:
      schedule: any schedule.
      forward: the work of one micro-batch's forward on one rank, in all its stages. An op of one
        stage costs 1 / `num_chunks` of it.
      backward: the work of its whole backward.
      weight: the part of `backward` that is the gradient of the leaves; None takes half. It has no
        effect if the schedule does not split backwards.

    Raises:
      ValueError: work is negative, or `weight` exceeds `backward`.
    """
    part = backward / 2 if weight is None else weight
    if forward < 0 or not 0 <= part <= backward:
        raise ValueError(
            f"work of forward={forward}, backward={backward}, weight={weight}; use none below 0, "
            "and for weight a part of backward"
        )
    part = part if schedule.splits else 0.0
    done = np.zeros((schedule.ticks, schedule.num_ranks, len(OPS)))
    for op, name in enumerate(OPS):
        for stage, rank in enumerate(schedule.ranks):
            done[:, rank, op] += getattr(schedule, name)[:, stage] != NONE
    return done * np.array([forward, backward - part, part], np.float64) / schedule.num_chunks


def cost(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the critical path in lockstep: a tick lasts as long as its busiest rank works.

    A program in which all ranks exchange after every tick takes this long.

    Args:
      schedule: any schedule.
      forward, backward, weight: as in `work_of`.

    Returns:
      The sum over ticks of the busiest rank's work.

    Raises:
      ValueError: work is negative, or `weight` exceeds `backward`.
    """
    return float(work_of(schedule, forward, backward, weight).sum(axis=2).max(axis=1).sum())


def bubble(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the average share of the lockstep time in which a rank is idle.

    For 1F1B with memory="low" and equal work of forward and backward it is (p - 1) / (m + p - 1).

    Args:
      schedule: any schedule.
      forward, backward, weight: as in `work_of`.

    Returns:
      1 - work of all ranks / (ranks * lockstep cost), between 0 and 1.

    Raises:
      ValueError: work is negative, or `weight` exceeds `backward`.
    """
    busy = work_of(schedule, forward, backward, weight).sum()
    lockstep = cost(schedule, forward, backward, weight)
    return float(1 - busy / (schedule.num_ranks * lockstep)) if lockstep else 0.0


def critical_path(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the critical path without lockstep: a rank waits only for the inputs of its next op.

    Every rank does its ops in the order of its table, each as early as it can. A hop takes no time.
    For 1F1B the result is (m + p - 1)(forward + backward).

    Args:
      schedule: a schedule that `check` accepts.
      forward, backward, weight: as in `work_of`.

    Returns:
      The time at which the last rank is done.

    Raises:
      ValueError: the schedule cannot run, work is negative, or `weight` exceeds `backward`.
    """
    check(schedule)
    last = schedule.stages - 1
    work = work_of(schedule, forward, backward, weight)
    free = np.zeros(schedule.num_ranks)  # when each rank is done with its ops so far
    # When each stage is done with its forward, and its backward, of each micro-batch.
    sent = np.zeros((2, schedule.stages, schedule.microbatches))
    # In a table that can run, the ticks meet every op after the ops that it needs.
    for tick in range(schedule.ticks):
        for op, name in enumerate(OPS):
            table = getattr(schedule, name)[tick]
            for stage in np.flatnonzero(table != NONE).tolist():
                rank, i, there = schedule.ranks[stage], table[stage], 0.0
                if op == 0 and stage:
                    there = sent[0, stage - 1, i]
                elif op == 1 and stage < last:
                    there = sent[1, stage + 1, i]
                free[rank] = max(free[rank], there) + work[tick, rank, op]
                if op < 2:
                    sent[op, stage, i] = free[rank]
    return float(free.max())
