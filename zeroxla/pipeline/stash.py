"""Where a stage keeps what it received until its last use: slots of two rings, as tables.

Inputs of stages after the first, gradients of stages before the last. (The first stage reads its
batch, the last one begins the backward.) Something is live from the tick at whose start it arrives
to the tick of its last use, both included: its slot is free for an arrival in the tick after.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from zeroxla.pipeline.schedule import NONE, Schedule, times


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stash:
    """Slots for one schedule; tables are int32, -1 where there is nothing.

    The number of slots is that of the stage that needs the most: all stages run one program.

    Attributes:
      num_input_slots: slots of the ring of inputs; 0 for a single stage.
      num_gradient_slots: slots of the ring of gradients; 0 for a single stage, or without backward.
      input_slots: [stages, microbatches], where a stage keeps a micro-batch's input.
      gradient_slots: [stages, microbatches], where it keeps the gradient of its output.
      input_arrivals: [ticks, stages], the slot for what arrives at the start of a tick from the
        stage before: what that one did the forward of in the tick before.
      gradient_arrivals: [ticks, stages], the same from the stage after, of its backwards.
      peak_inputs: per stage, the most inputs live at a time; 0 on the first.
      peak_gradients: per stage, the most gradients live at a time; 0 on the last.
      in_flight: per stage, the most micro-batches held at a time: `peak_inputs`, and on the first
        stage those between their forward and their last use.
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
    """Give each input and each gradient a slot that nothing else needs while it is live.

    Args:
      schedule: one that `check` accepts.

    Returns:
      Slots as few as possible: as many as are ever live at a time on one stage.
    """
    m, p = schedule.microbatches, schedule.stages
    forward, backward = times(schedule.forward, m), times(schedule.backward, m)
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


def last_use(schedule: Schedule) -> np.ndarray:
    """Return the tick in which a stage is done with a micro-batch, int32 [stages, microbatches]."""
    if schedule.splits:
        return times(schedule.weight, schedule.microbatches)
    if schedule.trains:
        return times(schedule.backward, schedule.microbatches)
    return times(schedule.forward, schedule.microbatches)


def _color(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Colour intervals, ends included, with the lowest free colour in the order of their starts.

    For intervals that is optimal: a new colour is taken only while all others are live.
    """
    colors = np.full(len(first), NONE, np.int32)
    until: list[int] = []  # per colour, the end of its last interval
    for i in np.argsort(first, kind="stable").tolist():
        free = next((c for c, end in enumerate(until) if end < first[i]), len(until))
        until[free : free + 1] = [int(last[i])]
        colors[i] = free
    return colors


def _arrivals(sent: np.ndarray, slots: np.ndarray, *, hop: int) -> np.ndarray:
    """Return slots [ticks, stages] of what stage - hop sent in the tick before."""
    ticks, stages = sent.shape
    arrivals = np.full((ticks, stages), NONE, np.int32)
    for tick in range(1, ticks):
        for stage in range(max(hop, 0), stages + min(hop, 0)):
            microbatch = sent[tick - 1, stage - hop]
            if microbatch != NONE:
                arrivals[tick, stage] = slots[stage, microbatch]
    return arrivals
