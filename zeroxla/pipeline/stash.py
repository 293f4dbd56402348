"""Where a rank keeps arrivals until their last use: slots of rings, as tables.

One ring is for inputs, of every stage but the first, which reads the batch. Another is for
gradients, of every stage but the last, which begins the backward. The third is for what a backward
leaves to a weight gradient of its own, and the last for what a forward leaves to a backward, where
that does not run the forward again. All stages of a rank share its rings.

An arrival is live from the tick at whose start it arrives to the tick of its last use, both
included. In the tick after that another one may take its slot.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule, ticks_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stash:
    """The slots for one schedule. Tables are int32, with -1 for none.

    All ranks run one program, so each has as many slots as the rank that needs the most.

    A hop is how many ranks on the receiver is from the sender, modulo the number of ranks; 0 means
    the same rank.

    Attributes:
      num_input_slots: the number of slots for inputs; 0 for a single stage.
      num_gradient_slots: the number of slots for gradients; 0 for a single stage, or without
        backward.
      num_kept_slots: the number of slots for what backwards leave to weight gradients; 0 if the
        schedule does not split them off.
      num_tape_slots, num_last_tape_slots: the number of slots for what forwards leave to backwards;
        0 without backward. The last stage has a ring of its own: its backward follows soon, so
        it needs few slots, and what it leaves is large where it computes logits.
      input_slots: [stages, microbatches], the slot of its rank in which a stage keeps a
        micro-batch's input.
      gradient_slots: [stages, microbatches], the slot in which it keeps the gradient of its output.
      kept_slots: [stages, microbatches], the slot for what its backward leaves to its weight
        gradient.
      tape_slots: [stages, microbatches], the slot for what its forward leaves to its backward.
      input_arrivals: by hop, [ticks, ranks], the slot for the input that arrives at the start of a
        tick. It was computed in the tick before, by the stage before.
      gradient_arrivals: the same for the gradient that arrives from the stage after.
      peak_inputs: for each rank, the most inputs that are live at a time; the first stage's count
        as none.
      peak_gradients: for each rank, the most gradients that are live at a time; the last stage's
        count as none.
      peak_kept: for each rank, the most weight gradients that are put off at a time, from their
        backward to themselves.
      in_flight: for each rank, the most inputs held at a time. It equals `peak_inputs`, except on
        the rank of the first stage, which holds a micro-batch from its forward to its last use.
    """

    num_input_slots: int
    num_gradient_slots: int
    num_kept_slots: int
    num_tape_slots: int
    num_last_tape_slots: int
    input_slots: np.ndarray = dataclasses.field(repr=False)
    gradient_slots: np.ndarray = dataclasses.field(repr=False)
    kept_slots: np.ndarray = dataclasses.field(repr=False)
    tape_slots: np.ndarray = dataclasses.field(repr=False)
    input_arrivals: dict[int, np.ndarray] = dataclasses.field(repr=False)
    gradient_arrivals: dict[int, np.ndarray] = dataclasses.field(repr=False)
    peak_inputs: tuple[int, ...]
    peak_gradients: tuple[int, ...]
    peak_kept: tuple[int, ...]
    in_flight: tuple[int, ...]


def make_stash(schedule: Schedule) -> Stash:
    """Give each input and each gradient a slot of its own while it is live.

    Args:
      schedule: a schedule that `check` accepts.

    Returns:
      The stash with the fewest slots: the largest number of arrivals live at a time on a rank.
    """
    m, p = schedule.microbatches, schedule.stages
    forward, backward = ticks_of(schedule.forward, m), ticks_of(schedule.backward, m)
    last = last_use(schedule)
    after = range(1, p)
    inputs = _slots(schedule, after, forward[:-1] + 1, last[1:])
    all_inputs = _slots(schedule, range(p), np.concatenate([forward[:1], forward[:-1] + 1]), last)
    before = range(p - 1) if schedule.trains else range(0)
    gradients = _slots(schedule, before, backward[1:] + 1, last)
    kept = _slots(schedule, range(p) if schedule.splits else range(0), backward, last)
    tapes = _slots(schedule, before, forward, last)
    num_tapes, num_last_tapes = max(_peaks(schedule, tapes)), 0
    if schedule.trains:
        tapes[-1] = _color(forward[-1], last[-1])
        num_last_tapes = int(tapes[-1].max()) + 1
    peak_inputs, peak_gradients = _peaks(schedule, inputs), _peaks(schedule, gradients)
    peak_kept = _peaks(schedule, kept)
    return Stash(
        num_input_slots=max(peak_inputs),
        num_gradient_slots=max(peak_gradients),
        num_kept_slots=max(peak_kept),
        num_tape_slots=num_tapes,
        num_last_tape_slots=num_last_tapes,
        input_slots=inputs,
        gradient_slots=gradients,
        kept_slots=kept,
        tape_slots=tapes,
        input_arrivals=_arrivals(schedule, schedule.forward, inputs, step=1),
        gradient_arrivals=_arrivals(schedule, schedule.backward, gradients, step=-1),
        peak_inputs=peak_inputs,
        peak_gradients=peak_gradients,
        peak_kept=peak_kept,
        in_flight=_peaks(schedule, all_inputs),
    )


def ring_size(schedule: Schedule) -> int:
    """Return the least n with which each stage may keep micro-batch i in slot i % n of a ring of
    its own, from its forward to its last use."""
    m = schedule.microbatches
    first, last = ticks_of(schedule.forward, m), last_use(schedule)
    for size in range(1, m):
        clashes = (
            np.any(last[:, i] >= first[:, i + size]) or np.any(first[:, i] > first[:, i + size])
            for i in range(m - size)
        )
        if not any(clashes):
            return size
    return m


def last_use(schedule: Schedule) -> np.ndarray:
    """Return the tick in which a stage last needs a micro-batch, int32 [stages, microbatches]."""
    if schedule.splits:
        return ticks_of(schedule.weight, schedule.microbatches)
    if schedule.trains:
        return ticks_of(schedule.backward, schedule.microbatches)
    return ticks_of(schedule.forward, schedule.microbatches)


def _slots(schedule: Schedule, stages: range, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return slots [stages, microbatches] for what is live from tick `first` to `last`.

    Both have a row for each of `stages`, and may have more after those. Other stages get no slots.
    """
    slots = np.full((schedule.stages, schedule.microbatches), NONE, np.int32)
    for rank in range(schedule.num_ranks):
        here = [stage for stage in schedule.stages_of(rank) if stage in stages]
        rows = [stages.index(stage) for stage in here]
        colors = _color(first[rows].ravel(), last[rows].ravel())
        slots[here] = colors.reshape(len(here), schedule.microbatches)
    return slots


def _color(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Colour intervals, ends included, so that intervals that overlap differ.

    In the order of their starts each takes the lowest free colour. For intervals this is optimal:
    a new colour is taken only while all others are live.
    """
    colors = np.full(len(first), NONE, np.int32)
    until: list[int] = []  # for each colour, the end of its last interval
    for i in np.argsort(first, kind="stable").tolist():
        free = next((c for c, end in enumerate(until) if end < first[i]), len(until))
        until[free : free + 1] = [int(last[i])]
        colors[i] = free
    return colors


def _peaks(schedule: Schedule, slots: np.ndarray) -> tuple[int, ...]:
    """Return the number of slots that each rank uses."""
    return tuple(
        int(slots[list(schedule.stages_of(rank))].max()) + 1 for rank in range(schedule.num_ranks)
    )


def _arrivals(
    schedule: Schedule, sent: np.ndarray, slots: np.ndarray, *, step: int
) -> dict[int, np.ndarray]:
    """Return, by hop, the slots [ticks, ranks] for what stage - step sent in the tick before."""
    ranks, count = schedule.ranks, schedule.num_ranks
    arrivals: dict[int, np.ndarray] = {}
    for stage in range(max(step, 0), schedule.stages + min(step, 0)):
        hop = (ranks[stage] - ranks[stage - step]) % count
        table = arrivals.setdefault(hop, np.full((schedule.ticks, count), NONE, np.int32))
        tick = np.flatnonzero(sent[:-1, stage - step] != NONE)
        table[tick + 1, ranks[stage]] = slots[stage, sent[tick, stage - step]]
    return dict(sorted(arrivals.items()))
