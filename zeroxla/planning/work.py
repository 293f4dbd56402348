"""What the equations of a traced program compute and read: FLOPs, and bytes of main memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from zeroxla.planning.liveness import Scope, size_of
from zeroxla.program.trace import Atom, Equation, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one equation does on one device.

    Attributes:
      flops: of products and convolutions, a multiplication and an addition each.
      dtype: of their operands.
      num_bytes: read from and written to memory, what is fused into it included.
    """

    flops: float
    dtype: str
    num_bytes: float


def work_of(eq: Equation, reads: Mapping[Value, frozenset[Value]], scope: Scope) -> Work:
    """Return the work of an equation that writes to memory.

    Args:
      eq: of the scope's program.
      reads: of each fused value, what computing it reads from memory; see `reads_of`.
      scope: says what is in memory.
    """
    sources: set[Value] = set()
    for atom in eq.inputs:
        sources |= memory_of(atom, reads, scope)
    written = sum(size_of(v) for v in eq.outputs if v in scope.in_memory)
    num_bytes = sum(map(size_of, sources)) + written
    dtype = str(eq.values[0].aval.dtype) if eq.values else "float32"
    return Work(_flops(eq), dtype, num_bytes)


def memory_of(
    atom: Atom, reads: Mapping[Value, frozenset[Value]], scope: Scope
) -> frozenset[Value]:
    """Return what reading an operand reads from memory."""
    if not isinstance(atom, Value):
        return frozenset()
    value = scope.roots.get(atom, atom)
    return reads.get(value, frozenset((value,)))


def reads_of(scope: Scope, fused: frozenset[str]) -> dict[Value, frozenset[Value]]:
    """Return what each value that is not in memory is computed from."""
    found: dict[Value, frozenset[Value]] = {}
    for eq in scope.program.equations:
        if eq.name in fused:
            sources = frozenset().union(*(memory_of(a, found, scope) for a in eq.inputs))
            found.update((v, sources) for v in eq.outputs if v not in scope.in_memory)
    return found


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
        # Each output element sums over the kernel but its output features.
        return 2.0 * out.aval.size * math.prod(kernel) / kernel[numbers[0]]
    return 0.0
