"""What a schedule costs: its critical path in lockstep and without, and the share of idle time.

Work is measured in any unit, by default a forward. A table that splits backwards is charged
`backward - weight` for the gradient of a stage's input and `weight` for that of its leaves, so that
the same three numbers compare all schedules.
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
      schedule: any.
      forward: work of one forward of one stage.
      backward: work of one whole backward.
      weight: the part of it that is the gradient of the leaves; None for half. Of no account where
        the table does not split it off.

    Raises:
      ValueError: negative work, or `weight` above `backward`.
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

    That is what a program costs in which all stages exchange after every tick.

    Args:
      schedule: any.
      forward: as in `work_of`.
      backward: as in `work_of`.
      weight: as in `work_of`.

    Returns:
      The sum over ticks of the largest work of a stage.

    Raises:
      ValueError: negative work, or `weight` above `backward`.
    """
    return float(work_of(schedule, forward, backward, weight).sum(axis=2).max(axis=1).sum())


def bubble(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the share of the lockstep time that stages are idle, on average.

    For 1F1B it is (p - 1) / (m + p - 1), with memory="low" where forward and backward are alike.

    Args:
      schedule: any.
      forward: as in `work_of`.
      backward: as in `work_of`.
      weight: as in `work_of`.

    Returns:
      1 - work of all stages / (stages * lockstep cost), 0 to 1.

    Raises:
      ValueError: negative work, or `weight` above `backward`.
    """
    busy = work_of(schedule, forward, backward, weight).sum()
    lockstep = cost(schedule, forward, backward, weight)
    return float(1 - busy / (schedule.stages * lockstep)) if lockstep else 0.0


def critical_path(
    schedule: Schedule, forward: float = 1, backward: float = 2, weight: float | None = None
) -> float:
    """Return the critical path without lockstep: a stage waits only for what its next op needs.

    Every stage does its ops in the order of its table, each as early as it can; a hop takes no
    time. For 1F1B that is (m + p - 1)(forward + backward).

    Args:
      schedule: one that `check` accepts.
      forward: as in `work_of`.
      backward: as in `work_of`.
      weight: as in `work_of`.

    Returns:
      The time at which the last stage is done.

    Raises:
      ValueError: the schedule cannot run, negative work, or `weight` above `backward`.
    """
    check(schedule)
    p, m = schedule.stages, schedule.microbatches
    work = work_of(schedule, forward, backward, weight)
    free = np.zeros(p)  # when each stage has done what it began
    sent = np.zeros((2, p, m))  # when its forward and its backward of a micro-batch are done
    # In a table that can run, ticks are an order in which what is needed comes first.
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
