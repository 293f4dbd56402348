"""Proves that a schedule can run, whoever wrote its tables."""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule, ticks_of
from zeroxla.pipeline.stash import Stash, last_use, make_stash


def check(schedule: Schedule, stash: Stash | None = None) -> None:
    """Prove that a schedule can run with the slots of a stash.

    Every stage does each micro-batch exactly once: the forward, then the backward (if any stage
    trains), then the weight gradient (if any stage splits it off). Whatever a stage reads from a
    neighbour was sent in an earlier tick. No slot is overwritten while it is live, every use finds
    its micro-batch in its slot, and no stage holds more than `schedule.stash_bound`.

    Args:
      schedule: any schedule.
      stash: the slots; None takes those that `make_stash` gives.

    Raises:
      ValueError: one of these rules is broken. The message names the stage, the micro-batch and the
        ticks.
    """
    _check_once(schedule)
    _check_order(schedule)
    stash = make_stash(schedule) if stash is None else stash
    _check_ring(schedule, stash, "input")
    _check_ring(schedule, stash, "gradient")
    _check_bound(schedule)


def _check_once(schedule: Schedule) -> None:
    """Check that every stage does each op of each micro-batch once."""
    wanted = {"forward": True, "backward": schedule.trains, "weight": schedule.splits}
    for op, table in _ops(schedule).items():
        tick, stage = np.nonzero(table != NONE)
        count = np.zeros((schedule.stages, schedule.microbatches), int)
        np.add.at(count, (stage, table[tick, stage]), 1)
        for stage, i in np.argwhere(count != wanted[op]).tolist():
            if not count[stage, i]:
                wrong = f"never does {op} of micro-batch {i}, in {schedule.ticks} ticks"
                raise _error(schedule, f"stage {stage} {wrong}", "add it")
            found = np.flatnonzero(table[:, stage] == i).tolist()
            wrong = f"does {op} of micro-batch {i} {len(found)} times, at ticks {_list(found)}"
            raise _error(schedule, f"stage {stage} {wrong}", "keep one")


def _check_order(schedule: Schedule) -> None:
    """Check that every op comes after the ops that it needs."""
    p, m = schedule.stages, schedule.microbatches
    forward, backward, weight = (ticks_of(table, m) for table in _ops(schedule).values())
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
            raise _error(
                schedule,
                f"stage {stage} does {op} of micro-batch {i} at tick {when[stage, i]}, but stage "
                f"{source} does its {needed} at tick {before[source, i]}",
                f"put it at tick {first} or later"
                + (": what is sent is there in the next tick" if hop else ""),
            )


def _check_ring(schedule: Schedule, stash: Stash, kind: str) -> None:
    """Follow one ring of every stage through all ticks, as `Ticks.run` would."""
    if kind == "input":
        sent, hop, slots = schedule.forward, 1, stash.input_slots
        arrivals, num_slots = stash.input_arrivals, stash.num_input_slots
    else:
        sent, hop, slots = schedule.backward, -1, stash.gradient_slots
        arrivals, num_slots = stash.gradient_arrivals, stash.num_gradient_slots
    uses = {op: t for op, t in _ops(schedule).items() if kind == "input" or op != "forward"}
    last = last_use(schedule)
    for stage in range(max(hop, 0), schedule.stages + min(hop, 0)):
        ring: dict[int, int] = {}  # slot -> micro-batch, live or not
        for tick in range(schedule.ticks):
            i = int(sent[tick - 1, stage - hop]) if tick else NONE
            slot, own = int(arrivals[tick, stage]), int(slots[stage, i]) if i != NONE else NONE
            came = f"{kind} of micro-batch {i}" if i != NONE else f"no {kind}"
            came = f"{came} arrives on stage {stage} at tick {tick}"
            if slot != own:
                raise _error(
                    schedule, f"{came} but is written to slot {slot}", f"write it to slot {own}"
                )
            if i != NONE:
                if not 0 <= slot < num_slots:
                    raise _error(
                        schedule, f"{came} in slot {slot} of {num_slots}", "use one of the slots"
                    )
                held = ring.get(slot)
                if held is not None and last[stage, held] >= tick:
                    until = f"which holds micro-batch {held} until tick {last[stage, held]}"
                    raise _error(
                        schedule, f"{came} in slot {slot}, {until}", "give one of them another slot"
                    )
                ring[slot] = i
            for op, table in uses.items():
                used = int(table[tick, stage])
                if used != NONE and ring.get(int(slots[stage, used])) != used:
                    raise _error(
                        schedule,
                        f"{op} of micro-batch {used} on stage {stage} at tick {tick} finds its "
                        f"{kind} not in slot {slots[stage, used]}",
                        "give it a slot of its own until then",
                    )


def _check_bound(schedule: Schedule) -> None:
    """Check that no stage holds more micro-batches than the schedule's bound."""
    if schedule.stash_bound is None:
        return
    # Count from the ticks alone: the slots must not prove themselves.
    forward, last = ticks_of(schedule.forward, schedule.microbatches), last_use(schedule)
    for stage, bound in enumerate(schedule.stash_bound):
        first = forward[stage - 1] + 1 if stage else forward[0]
        for tick in range(schedule.ticks):
            live = np.flatnonzero((first <= tick) & (tick <= last[stage])).tolist()
            if len(live) > bound:
                raise _error(
                    schedule,
                    f"stage {stage} holds micro-batches {_list(live)} at tick {tick}, "
                    f"{len(live)} of them, but its stash bound is {bound}",
                    "delay a forward, or raise the bound",
                )


def _ops(schedule: Schedule) -> dict[str, np.ndarray]:
    """Return the tables, in the order in which a stage works within a tick."""
    return {
        "forward": schedule.forward,
        "backward": schedule.backward,
        "weight": schedule.weight,
    }


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _error(schedule: Schedule, wrong: str, remedy: str) -> ValueError:
    return ValueError(f"schedule {schedule.name!r} cannot run: {wrong}; {remedy}")
