"""Where a stage keeps arrivals until their last use: slots of two rings, as tables.

One ring is for inputs, on every stage but the first, which reads the batch. The other is for
gradients, on every stage but the last, which begins the backward. An arrival is live from the tick
at whose start it arrives to the tick of its last use, both included. In the tick after that another
one may take its slot.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule, ticks_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stash:
    """The slots for one schedule. Tables are int32, with -1 for none.

    All stages run one program, so each has as many slots as the stage that needs the most.

    Attributes:
      num_input_slots: the number of slots for inputs; 0 for a single stage.
      num_gradient_slots: the number of slots for gradients; 0 for a single stage, or without
        backward.
      input_slots: [stages, microbatches], the slot in which a stage keeps a micro-batch's input.
      gradient_slots: [stages, microbatches], the slot in which it keeps the gradient of its output.
      input_arrivals: [ticks, stages], the slot for the input that arrives at the start of a tick.
        The stage before computed it in the tick before.
      gradient_arrivals: [ticks, stages], the same for the gradient that arrives from the stage
        after.
      peak_inputs: for each stage, the most inputs that are live at a time; 0 on the first.
      peak_gradients: for each stage, the most gradients that are live at a time; 0 on the last.
      in_flight: for each stage, the most micro-batches held at a time. It equals `peak_inputs`,
        except on the first stage, which holds a micro-batch from its forward to its last use.
    """

    num_input_slots: int
    num_gradient_slots: int
    input_slots: np.ndarray = dataclasses.field(repr=False)
    gradient_slots: np.ndarray = dataclasses.field(repr=False)
    input_arrivals: np.ndarray = dataclasses.field(repr=False)
    gradient_arrivals: np.ndarray = dataclasses.field(repr=False)
    peak_inputs: tuple[int, ...]
    peak_gradients: tuple[int, ...]
    in_flight: tuple[int, ...]


def make_stash(schedule: Schedule) -> Stash:
    """Give each input and each gradient a slot of its own while it is live.

    Args:
      schedule: a schedule that `check` accepts.

    Returns:
      The stash with the fewest slots: the largest number of arrivals live at a time on a stage.
    """
    m, p = schedule.microbatches, schedule.stages
    forward, backward = ticks_of(schedule.forward, m), ticks_of(schedule.backward, m)
    last = last_use(schedule)
    inputs = np.full((p, m), NONE, np.int32)
    gradients = np.full((p, m), NONE, np.int32)
    for stage in range(1, p):
        inputs[stage] = _color(forward[stage - 1] + 1, last[stage])
    if schedule.trains:
        for stage in range(p - 1):
            gradients[stage] = _color(backward[stage + 1] + 1, last[stage])
    peak_inputs = tuple((inputs.max(axis=1) + 1).tolist())
    peak_gradients = tuple((gradients.max(axis=1) + 1).tolist())
    return Stash(
        num_input_slots=max(peak_inputs),
        num_gradient_slots=max(peak_gradients),
        input_slots=inputs,
        gradient_slots=gradients,
        input_arrivals=_arrivals(schedule.forward, inputs, hop=1),
        gradient_arrivals=_arrivals(schedule.backward, gradients, hop=-1),
        peak_inputs=peak_inputs,
        peak_gradients=peak_gradients,
        in_flight=(int(_color(forward[0], last[0]).max()) + 1, *peak_inputs[1:]),
    )


def ring_size(schedule: Schedule) -> int:
    """Return the least n with which each stage may keep micro-batch i in slot i % n of a ring, from
    its forward to its last use."""
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


def _arrivals(sent: np.ndarray, slots: np.ndarray, *, hop: int) -> np.ndarray:
    """Return the slots [ticks, stages] for arrivals: stage - hop sent them in the tick before."""
    ticks, stages = sent.shape
    arrivals = np.full((ticks, stages), NONE, np.int32)
    for tick in range(1, ticks):
        for stage in range(max(hop, 0), stages + min(hop, 0)):
            microbatch = sent[tick - 1, stage - hop]
            if microbatch != NONE:
                arrivals[tick, stage] = slots[stage, microbatch]
    return arrivals
