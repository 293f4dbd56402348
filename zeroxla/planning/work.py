"""The work of a traced program's equations on one device: FLOPs, and bytes of its main memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from zeroxla.planning.liveness import Scope, size_of
from zeroxla.program.primitives import FUSED
from zeroxla.program.trace import Equation, Operand, Value

Reads = Mapping[Value, frozenset[Value]]
"""The values in memory that computing each fused value reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one equation does on one device.

    Attributes:
      flops: the FLOPs of a product or convolution, a multiplication and an addition each.
      dtype: the dtype of its operands.
      num_bytes: bytes of memory that it and the equations fused into it read and write.
    """

    flops: float
    dtype: str
    num_bytes: float


def work_of(eq: Equation, reads: Reads, scope: Scope) -> Work:
    """Return the work of an equation that writes to memory.

    Args:
      eq: an equation of the scope's program.
      reads: returned by `reads_of` for the scope.
      scope: says which values are in memory.
    """
    sources: set[Value] = set()
    for operand in eq.inputs:
        sources |= _sources(operand, reads, scope)
    written = sum(size_of(v) for v in eq.outputs if v in scope.in_memory)
    num_bytes = sum(map(size_of, sources)) + written
    if eq.name == "dynamic_update_slice":  # in place
        num_bytes = 2.0 * sum(map(size_of, eq.values[1:2]))
    dtype = str(eq.values[0].aval.dtype) if eq.values else "float32"
    return Work(_flops(eq), dtype, num_bytes)


def reads_of(scope: Scope) -> Reads:
    """Return the values in memory that computing each fused value reads."""
    found: dict[Value, frozenset[Value]] = {}
    for eq in scope.program.equations:
        if eq.name in FUSED:
            sources = frozenset().union(*(_sources(operand, found, scope) for operand in eq.inputs))
            fused = [v for v in eq.outputs if v not in scope.in_memory]
            # A slice is read where it lies, and nothing beside it.
            is_slice = eq.name == "dynamic_slice"
            found.update((v, frozenset((v,)) if is_slice else sources) for v in fused)
    return found


def _sources(operand: Operand, reads: Reads, scope: Scope) -> frozenset[Value]:
    """Return the values in memory that reading an operand reads."""
    if not isinstance(operand, Value):
        return frozenset()
    value = scope.roots.get(operand, operand)
    return reads.get(value, frozenset((value,)))


def _flops(eq: Equation) -> float:
    (out, *_) = eq.outputs
    if eq.name == "dot_general":
        (contracted, _), _ = eq.params["dimension_numbers"]
        lhs = eq.inputs[0]
        shape = lhs.aval.shape if isinstance(lhs, Value) else jnp.shape(lhs.value)
        return 2.0 * out.aval.size * math.prod(shape[d] for d in contracted)
    if eq.name == "conv_general_dilated":
        kernel = eq.values[-1].aval.shape
        numbers = eq.params["dimension_numbers"].rhs_spec
        # An output element sums over all dims of the kernel but the output features.
        return 2.0 * out.aval.size * math.prod(kernel) / kernel[numbers[0]]
    return 0.0
