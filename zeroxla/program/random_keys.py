"""Random keys that are derived from other keys: a name for each purpose that needs one.

`fold_in(key, number)` derives a key. Purposes that derive from the same key need different numbers,
or they draw the same bits. Numbers that only keep purposes apart stand here; counters (of steps,
micro-batches, devices, layers, tokens) stand where things are counted. This is the whole tree:

    key of `Step.init`   draws the parameters; STATE gives the key that the state keeps
    key of the state     the number of the step gives the step's key
    key of a step        the number of the micro-batch (EVALUATION in `Step.eval`), then the rank of
                         the device, give the key of the model's loss
    key of a loss        the names of rng streams (`frontend.stream_key`) give the model's own keys
    key of a step or     the number of the device (its rank where no axis splits the work on a row),
      of a loss          then ROUNDINGS, give the key of what wires round: once in a step, or in one
                         pass over a fetch plan
    roundings of a step  StepRounding and the leaf
    roundings of a pass  PassRounding and the segment; UNIT_GATHERS, then the leaf
    key of an RLHF run   the number of the iteration; SAMPLES

Come here before new code derives a key. A number that changes here changes every later draw.
"""

from __future__ import annotations

import enum

import jax

STATE = 1
"""For the key that a training state keeps. The key itself initialises the model."""

EVALUATION = 0
"""For an evaluation, in the place of the number of the micro-batch."""

ROUNDINGS = 0x77697265
"""For stochastic rounding on wires, apart from the ranks of devices and from dropout ("wire")."""

UNIT_GATHERS = 2**31 - 1
"""For the gathers of a pass over a fetch plan, above all numbers of `PassRounding`."""

SAMPLES = 2**31
"""For the responses that an RLHF run shows, above all numbers of iterations."""


class StepRounding(enum.IntEnum):
    """What is rounded once in a step. Each purpose has a number for every leaf of the model."""

    GATHER = 0
    """Gathers before the first micro-batch, and hops of a gather that are made once in a step: a
    key for each leaf."""
    CORRECTED_NODE_HOP = 1
    """The hop over `node` with error feedback: a key for each leaf."""
    NODE_HOP = 2
    """The hop over `node` of all other leaves: one key."""
    REDUCE = 3
    """The reduce of leaves that are whole through the step: one key."""
    COPY = 4
    """New copies of leaves that are made before the first micro-batch, as they travel on: a key for
    each leaf."""


class PassRounding(enum.IntEnum):
    """What is rounded in a pass over a fetch plan. Each purpose has a number for every segment."""

    SEGMENT = 0
    """What the segment's own body rounds: a loop's layers, or a rematerialised part."""
    REDUCE = 1
    """The reduce of the gradients that are complete after the segment's backward."""


def number_of(purpose: StepRounding | PassRounding, i: int, count: int) -> int:
    """Return the number to fold in for a purpose and the i-th of `count` leaves or segments."""
    return purpose * count + i


def fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    """Derive a key as `jax.random.fold_in` does; return None if there is no key."""
    return None if key is None else jax.random.fold_in(key, number)
