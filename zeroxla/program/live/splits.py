"""Over how many devices the arrays of a step's global program are split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zeroxla.program.live.liveness import size_of
from zeroxla.program.trace import Program, Value

Splits = Mapping[Value, int]
"""The number of devices that share a value between them; 1 if each device has all of it."""


def splits_of(program: Program, shapes: Sequence[Any]) -> Splits:
    """Return over how many devices each value of a step's program is split.

    The inputs' shardings say so, and what each device returns of the gradients. Other results are
    taken to be split like the operand that is split most; scalars are whole on every device.

    Args:
      program: a step's traced program.
      shapes: the shapes of its inputs, in order; one without a sharding counts as whole.
    """
    inputs = zip(program.inputs, shapes, strict=True)
    found = {value: _num_shards(x) for value, x in inputs}
    for eq in program.equations:
        if eq.name == "shard_map":
            for value, local in zip(eq.outputs, eq.params["jaxpr"].outvars, strict=True):
                found[value] = value.aval.size // max(1, local.aval.size)
            continue
        most = max((found.get(v, 1) for v in eq.values if v.aval.shape), default=1)
        found.update({v: most if v.aval.shape else 1 for v in eq.outputs})
    return found


def bytes_per_device(value: Value, splits: Splits) -> int:
    """Return the bytes that a device holds of a value."""
    return size_of(value) // splits.get(value, 1)


def _num_shards(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    if sharding is None:
        return 1
    return math.prod(x.shape) // max(1, math.prod(sharding.shard_shape(x.shape)))
