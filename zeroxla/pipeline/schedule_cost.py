"""The cost of a schedule: its critical path, in lockstep and without, and its share of idle time.

Work may have any unit; by default a forward is 1. In a schedule that splits backwards, the gradient
of a stage's input costs `backward - weight` and the gradient of its leaves `weight`. So the same
three numbers compare all schedules.
"""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule
from zeroxla.pipeline.schedule_check import check


def work_of(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> np.ndarray:
    """Return the work of each op, float64 [ticks, stages, 3]: forward, backward, weight gradient.

    Args:
      schedule: any schedule.
      forward: the work of one stage's forward of one micro-batch.
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
    done = np.stack([schedule.forward, schedule.backward, schedule.weight], axis=2) != NONE
    return done * np.array([forward, backward - part, part], np.float64)


def cost(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the critical path in lockstep: a tick lasts as long as its busiest stage works.

    A program in which all stages exchange after every tick takes this long.

    Args:
      schedule: any schedule.
      forward, backward, weight: as in `work_of`.

    Returns:
      The sum over ticks of the busiest stage's work.

    Raises:
      ValueError: work is negative, or `weight` exceeds `backward`.
    """
    return float(work_of(schedule, forward, backward, weight).sum(axis=2).max(axis=1).sum())


def bubble(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the average share of the lockstep time in which a stage is idle.

    For 1F1B with memory="low" and equal work of forward and backward it is (p - 1) / (m + p - 1).

    Args:
      schedule: any schedule.
      forward, backward, weight: as in `work_of`.

    Returns:
      1 - work of all stages / (stages * lockstep cost), between 0 and 1.

    Raises:
      ValueError: work is negative, or `weight` exceeds `backward`.
    """
    busy = work_of(schedule, forward, backward, weight).sum()
    lockstep = cost(schedule, forward, backward, weight)
    return float(1 - busy / (schedule.stages * lockstep)) if lockstep else 0.0


def critical_path(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the critical path without lockstep: a stage waits only for the inputs of its next op.

    Every stage does its ops in the order of its table, each as early as it can. A hop takes no
    time. For 1F1B the result is (m + p - 1)(forward + backward).

    Args:
      schedule: a schedule that `check` accepts.
      forward, backward, weight: as in `work_of`.

    Returns:
      The time at which the last stage is done.

    Raises:
      ValueError: the schedule cannot run, work is negative, or `weight` exceeds `backward`.
    """
    check(schedule)
    p, m = schedule.stages, schedule.microbatches
    work = work_of(schedule, forward, backward, weight)
    free = np.zeros(p)  # when each stage is done with its ops so far
    sent = np.zeros((2, p, m))  # when its forward and its backward of each micro-batch are done
    # In a table that can run, the ticks meet every op after the ops that it needs.
    for tick in range(schedule.ticks):
        for stage in range(p):
            i, j, k = (
                int(table[tick, stage])
                for table in (schedule.forward, schedule.backward, schedule.weight)
            )
            if i != NONE:
                there = sent[0, stage - 1, i] if stage else 0.0
                free[stage] = sent[0, stage, i] = max(free[stage], there) + work[tick, stage, 0]
            if j != NONE:
                there = sent[1, stage + 1, j] if stage < p - 1 else 0.0
                free[stage] = sent[1, stage, j] = max(free[stage], there) + work[tick, stage, 1]
            if k != NONE:
                free[stage] += work[tick, stage, 2]
    return float(free.max())
