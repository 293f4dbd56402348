"""Proves that a schedule can run, whoever wrote its tables."""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.ring_check import check_rings
from zeroxla.pipeline.schedule import NONE, OPS, Schedule, ticks_of
from zeroxla.pipeline.stash import Stash, last_use, make_stash


def check(schedule: Schedule, stash: Stash | None = None) -> None:
    """Prove that a schedule can run with the slots of a stash.

    Every stage does each micro-batch exactly once: the forward, then the backward (if any stage
    trains), then the weight gradient (if any stage splits it off). In a tick a rank does at most
    one of each, whatever the stage. Whatever a stage reads from a neighbour was sent in an earlier
    tick. No slot is overwritten while it is live, every use finds its micro-batch in its slot, and
    no rank holds more than `schedule.stash_bound`.

    Args:
      schedule: any schedule.
      stash: the slots; None takes those that `make_stash` gives.

    Raises:
      ValueError: one of these rules is broken. The message names the stage, the micro-batch and the
        ticks.
    """
    _check_once(schedule)
    _check_ranks(schedule)
    _check_order(schedule)
    check_rings(schedule, make_stash(schedule) if stash is None else stash)
    _check_bound(schedule)


def _check_once(schedule: Schedule) -> None:
    """Check that every stage does each op of each micro-batch once."""
    wanted = {"forward": True, "backward": schedule.trains, "weight": schedule.splits}
    for op in OPS:
        table = getattr(schedule, op)
        tick, stage = np.nonzero(table != NONE)
        count = np.zeros((schedule.stages, schedule.microbatches), int)
        np.add.at(count, (stage, table[tick, stage]), 1)
        for stage, i in np.argwhere(count != wanted[op]).tolist():
            if not count[stage, i]:
                wrong = f"never does {op} of micro-batch {i}, in {schedule.ticks} ticks"
                raise schedule.cannot_run(f"stage {stage} {wrong}", "add it")
            found = np.flatnonzero(table[:, stage] == i).tolist()
            wrong = f"does {op} of micro-batch {i} {len(found)} times, at ticks {_list(found)}"
            raise schedule.cannot_run(f"stage {stage} {wrong}", "keep one")


def _check_ranks(schedule: Schedule) -> None:
    """Check that no rank does an op of two of its stages in a tick."""
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        for op in OPS:
            table = getattr(schedule, op)[:, stages]
            for tick in np.flatnonzero((table != NONE).sum(axis=1) > 1).tolist():
                both = " and ".join(
                    f"of micro-batch {i} on stage {stage}"
                    for stage, i in zip(stages, table[tick].tolist(), strict=True)
                    if i != NONE
                )
                raise schedule.cannot_run(
                    f"rank {rank} does {op} {both} at tick {tick}", "keep one in a tick"
                )


def _check_order(schedule: Schedule) -> None:
    """Check that every op comes after the ops that it needs."""
    p, m = schedule.stages, schedule.microbatches
    forward, backward, weight = (ticks_of(getattr(schedule, op), m) for op in OPS)
    rules = [
        (("forward", stage, forward), ("forward", stage - 1, forward), 1) for stage in range(1, p)
    ]
    if schedule.trains:
        rules += [(("backward", p - 1, backward), ("forward", p - 1, forward), 0)]
        rules += [
            (("backward", stage, backward), ("backward", stage + 1, backward), 1)
            for stage in range(p - 1)
        ]
    if schedule.splits:
        rules += [
            (("weight", stage, weight), ("backward", stage, backward), 0) for stage in range(p)
        ]
    for (op, stage, when), (needed, source, before), hop in rules:
        for i in np.flatnonzero(when[stage] < before[source] + hop).tolist():
            first = int(before[source, i]) + hop
            raise schedule.cannot_run(
                f"stage {stage} does {op} of micro-batch {i} at tick {when[stage, i]}, but stage "
                f"{source} does its {needed} at tick {before[source, i]}",
                f"put it at tick {first} or later"
                + (": what is sent is there in the next tick" if hop else ""),
            )


def _check_bound(schedule: Schedule) -> None:
    """Check that no rank holds more inputs than the schedule's bound."""
    if schedule.stash_bound is None:
        return
    # Count from the ticks alone: the slots must not prove themselves.
    forward, last = ticks_of(schedule.forward, schedule.microbatches), last_use(schedule)
    first = np.concatenate([forward[:1], forward[:-1] + 1])
    for rank, bound in enumerate(schedule.stash_bound):
        stages = schedule.stages_of(rank)
        for tick in range(schedule.ticks):
            live = (first[stages, :] <= tick) & (tick <= last[stages, :])
            if live.sum() <= bound:
                continue
            if len(stages) == 1:
                held = f"stage {rank} holds micro-batches {_list(np.flatnonzero(live).tolist())}"
            else:
                held = f"rank {rank} holds " + " and ".join(
                    f"micro-batches {_list(np.flatnonzero(row).tolist())} of stage {stage}"
                    for stage, row in zip(stages, live, strict=True)
                    if row.any()
                )
            raise schedule.cannot_run(
                f"{held} at tick {tick}, {live.sum()} of them, but its stash bound is {bound}",
                "delay a forward, or raise the bound",
            )


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
