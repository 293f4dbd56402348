"""The work of a traced program's equations on one device: FLOPs, and bytes of its main memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.program.flops import product_flops
from zeroxla.program.live.liveness import Scope, size_of
from zeroxla.program.primitives import FUSED, REDUCTIONS, RENAMES
from zeroxla.program.trace import Equation, Program, Value


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


@dataclasses.dataclass(frozen=True, slots=True)
class Reads:
    """What the kernels of one scope read.

    Attributes:
      fused: the values in memory that computing each fused value reads.
      kernels: the values in memory that a kernel reads for an equation, beside those that it reads
        for earlier ones or makes itself. An equation that is no part of a kernel is missing.
    """

    fused: Mapping[Value, frozenset[Value]]
    kernels: Mapping[Equation, frozenset[Value]]


def work_of(eq: Equation, reads: Reads, scope: Scope) -> Work:
    """Return the work of an equation that writes to memory.

    Args:
      eq: an equation of the scope's program.
      reads: returned by `reads_of` for the scope.
      scope: says which values are in memory.
    """
    sources = reads.kernels.get(eq)
    if sources is None:
        sources = _sources_of(eq, reads.fused, scope)
    written = sum(size_of(v) for v in eq.outputs if v in scope.in_memory)
    num_bytes = sum(map(size_of, sources)) + written
    if eq.name == "dynamic_update_slice":  # in place
        num_bytes = 2.0 * sum(map(size_of, eq.values[1:2]))
    dtype = str(eq.values[0].aval.dtype) if eq.values else "float32"
    return Work(product_flops(eq), dtype, num_bytes)


def reads_of(scope: Scope) -> Reads:
    """Return what the kernels of a scope read.

    Compilers for GPUs and TPUs put equations that go through the same elements into one kernel with
    several results (multi-output fusion). It reads each operand once, and has what it makes itself.
    Two equations can share a kernel if neither waits for a product, a loop or a reduction that
    waits for the other. They do if they have an operand in common, or one reads the other. The
    CPU's compiler does not do this.
    """
    fused: dict[Value, frozenset[Value]] = {}
    writers: list[Equation] = []
    for eq in scope.program.equations:
        if eq.name in FUSED:
            sources = _sources_of(eq, fused, scope)
            results = [v for v in eq.outputs if v not in scope.in_memory]
            # A slice is read where it lies, and nothing beside it.
            is_slice = eq.name == "dynamic_slice"
            fused.update((v, frozenset((v,)) if is_slice else sources) for v in results)
        if eq.name in (FUSED | REDUCTIONS) and not scope.in_memory.isdisjoint(eq.outputs):
            writers.append(eq)
    if scope.platform == "cpu":
        return Reads(fused, {})
    waits = _num_waits(scope.program)
    kernels: dict[Equation, frozenset[Value]] = {}
    seen: dict[tuple[int, int, Value], None] = {}
    for eq in writers:
        sources = _sources_of(eq, fused, scope)
        # Equations of as many waits do not wait for each other.
        where = max((waits[v] for v in eq.values), default=0), _num_elements(eq)
        kernels[eq] = frozenset(v for v in sources if (*where, v) not in seen)
        seen.update(dict.fromkeys((*where, v) for v in (*sources, *eq.outputs)))
    return Reads(fused, kernels)


def _num_waits(program: Program) -> dict[Value, int]:
    """Return how many equations that are not fused stand, at most, one after another before each
    value."""
    waits = dict.fromkeys(program.inputs, 0)
    for eq in program.equations:
        before = max((waits[v] for v in eq.values), default=0)
        passed_on = eq.name in FUSED or eq.name in RENAMES
        waits.update(dict.fromkeys(eq.outputs, before if passed_on else before + 1))
    return waits


def _num_elements(eq: Equation) -> int:
    """Return the number of elements that a kernel goes through for an equation."""
    return max(v.aval.size for v in (eq.values if eq.name in REDUCTIONS else eq.outputs))


def _sources_of(
    eq: Equation, fused: Mapping[Value, frozenset[Value]], scope: Scope
) -> frozenset[Value]:
    """Return the values in memory that computing an equation reads."""
    found: set[Value] = set()
    for operand in eq.inputs:
        if isinstance(operand, Value):
            value = scope.roots.get(operand, operand)
            found |= fused.get(value, frozenset((value,)))
    return frozenset(found)
