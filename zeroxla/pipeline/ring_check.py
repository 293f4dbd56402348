"""Proves that a stash fits a schedule: nothing is overwritten or read too early, ring by ring."""

from __future__ import annotations

import numpy as np

from zeroxla.pipeline.schedule import NONE, OPS, Schedule, ticks_of
from zeroxla.pipeline.stash import Stash, last_use


def check_rings(schedule: Schedule, stash: Stash) -> None:
    """Follow the rings of every rank through all ticks, as `Ticks.run` would.

    Args:
      schedule: a schedule that keeps the other rules of `check`.
      stash: its slots.

    Raises:
      ValueError: something is written to no slot or to one that is live, or a use does not find its
        micro-batch in its slot.
    """
    m, p = schedule.microbatches, schedule.stages
    forward, backward = ticks_of(schedule.forward, m), ticks_of(schedule.backward, m)
    inputs = {stage: forward[stage - 1] + 1 for stage in range(1, p)}
    _check_arrivals(schedule, "input", inputs, stash.input_slots, stash.input_arrivals, step=1)
    _follow(schedule, "input", inputs, OPS, stash.input_slots, stash.num_input_slots)
    gradients = {stage: backward[stage + 1] + 1 for stage in range(p - 1)}
    if not schedule.trains:
        gradients = {stage: np.full(m, NONE) for stage in gradients}
    slots, num_slots = stash.gradient_slots, stash.num_gradient_slots
    _check_arrivals(schedule, "gradient", gradients, slots, stash.gradient_arrivals, step=-1)
    if schedule.trains:
        _follow(schedule, "gradient", gradients, OPS[1:], slots, num_slots)
        *tapes, last = enumerate(forward)
        for these, count in (
            (dict(tapes), stash.num_tape_slots),
            (dict([last]), stash.num_last_tape_slots),
        ):
            _follow(schedule, "tape", these, OPS[1:], stash.tape_slots, count)
    if schedule.splits:
        kept = dict(enumerate(backward))
        _follow(schedule, "residual", kept, OPS[2:], stash.kept_slots, stash.num_kept_slots)


def _check_arrivals(
    schedule: Schedule,
    kind: str,
    first: dict[int, np.ndarray],
    slots: np.ndarray,
    arrivals: dict[int, np.ndarray],
    *,
    step: int,
) -> None:
    """Check that all that arrives is written to its slot, and nothing else is written.

    Args:
      schedule: the schedule.
      kind: the word for what arrives.
      first: for each stage, the tick at whose start each micro-batch arrives, -1 for none.
      slots: the slot of each.
      arrivals: the tables to check.
      step: the sender of a stage is this many stages before it.
    """
    ranks, shape = schedule.ranks, (schedule.ticks, schedule.num_ranks)
    hop_of = {stage: (ranks[stage] - ranks[stage - step]) % schedule.num_ranks for stage in first}
    hops = sorted({*hop_of.values()})
    if {hop: table.shape for hop, table in arrivals.items()} != dict.fromkeys(hops, shape):
        given = ", ".join(f"{hop}: {list(table.shape)}" for hop, table in arrivals.items())
        raise schedule.cannot_run(
            f"the stash has the {kind} arrivals {{{given}}} by hop",
            f"make a table [ticks, ranks] = {list(shape)} for each of the hops {hops}",
        )
    came = {
        (hop_of[stage], int(tick), ranks[stage]): (stage, i)
        for stage, ticks in first.items()
        for i, tick in enumerate(ticks)
        if tick != NONE
    }
    for hop, table in arrivals.items():
        expected = np.full(shape, NONE)
        for (other, tick, rank), of in came.items():
            if other == hop:
                expected[tick, rank] = slots[of]
        for tick, rank in np.argwhere(table != expected).tolist():
            what, of = f"no {kind} arrives on rank {rank}", came.get((hop, tick, rank))
            if of is not None:
                what = f"{kind} of micro-batch {of[1]} arrives on stage {of[0]}"
            raise schedule.cannot_run(
                f"{what} at tick {tick} but is written to slot {table[tick, rank]}",
                f"write it to slot {expected[tick, rank]}",
            )


def _follow(
    schedule: Schedule,
    kind: str,
    first: dict[int, np.ndarray],
    ops: tuple[str, ...],
    slots: np.ndarray,
    num_slots: int,
) -> None:
    """Follow one ring of every rank through its writes and its uses.

    Args:
      schedule: the schedule.
      kind: the word for what the ring holds.
      first: for each stage, the tick in which each micro-batch is written, before any use.
      ops: the ops that use it.
      slots: the slot of each.
      num_slots: the length of the ring.
    """
    m, last = schedule.microbatches, last_use(schedule)
    used = {op: ticks_of(getattr(schedule, op), m) for op in ops}
    for rank in range(schedule.num_ranks):
        stages = [stage for stage in schedule.stages_of(rank) if stage in first]
        events = [(int(first[s][i]), -1, s, i) for s in stages for i in range(m)]
        events += [
            (int(ticks[s, i]), op, s, i)
            for op, ticks in enumerate(used.values())
            for s in stages
            for i in range(m)
            if ticks[s, i] != NONE
        ]
        ring: dict[int, tuple[int, int]] = {}  # slot -> (stage, micro-batch), live or not
        for tick, op, stage, i in sorted(events):
            slot = int(slots[stage, i])
            where = f"of micro-batch {i} is written on stage {stage} at tick {tick} to slot {slot}"
            if op >= 0:
                if ring.get(slot) != (stage, i):
                    raise schedule.cannot_run(
                        f"{ops[op]} of micro-batch {i} on stage {stage} at tick {tick} finds its "
                        f"{kind} not in slot {slot}",
                        "give it a slot of its own until then",
                    )
                continue
            if not 0 <= slot < num_slots:
                raise schedule.cannot_run(f"{kind} {where} of {num_slots}", "use one of the slots")
            held = ring.get(slot)
            if held is not None and last[held] >= tick:
                other = f"micro-batch {held[1]}"
                other += f" of stage {held[0]}" if held[0] != stage else ""
                raise schedule.cannot_run(
                    f"{kind} {where}, which holds {other} until tick {last[held]}",
                    "give one of them another slot",
                )
            ring[slot] = stage, i
