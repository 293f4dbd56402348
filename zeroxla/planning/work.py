"""The work of a traced program's equations on one device: FLOPs, and bytes of its main memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from zeroxla.planning.liveness import Scope, size_of
from zeroxla.program.primitives import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    FUSED,
    REDUCTIONS,
    RENAMES,
)
from zeroxla.program.trace import Equation, Operand, Program, Value


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
    return Work(_flops(eq), dtype, num_bytes)


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


def _flops(eq: Equation) -> float:
    (out, *_) = eq.outputs
    if eq.name == "dot_general":
        (contracted, _), _ = eq.params["dimension_numbers"]
        shape = _shape(eq.inputs[0])
        return 2.0 * out.aval.size * math.prod(shape[d] for d in contracted)
    if eq.name in ATTENTION_FORWARD:
        return _attention_flops(eq, of_queries=1, of_values=1)
    if eq.name in ATTENTION_BACKWARD:  # The scores again, and the derivatives of three operands.
        return _attention_flops(eq, of_queries=3, of_values=2)
    if eq.name == "conv_general_dilated":
        kernel = eq.values[-1].aval.shape
        numbers = eq.params["dimension_numbers"].rhs_spec
        # An output element sums over all dims of the kernel but the output features.
        return 2.0 * out.aval.size * math.prod(kernel) / kernel[numbers[0]]
    return 0.0


def _attention_flops(eq: Equation, *, of_queries: int, of_values: int) -> float:
    """Return the FLOPs of cuDNN's attention.

    Scores that a causal mask or a window hides are left out, as the kernel leaves them out.

    Args:
      eq: the equation; its first operands are queries, keys and values.
      of_queries, of_values: the number of products that contract or make a dim as wide as a query,
        and of those as wide as a value.
    """
    query, key, value = (_shape(operand) for operand in eq.inputs[:3])
    heads, length = (1, 2) if eq.params["layout"] else (2, 1)
    seen = _num_seen(query[length], key[length], eq.params)
    width = of_queries * query[-1] + of_values * value[-1]
    return 2.0 * query[0] * query[heads] * seen * width


def _num_seen(num_queries: int, num_keys: int, params: Mapping[str, Any]) -> float:
    """Return the number of pairs of a query and a key that it sees."""
    if not params["mask_type"].name.endswith("CAUSAL"):
        return float(num_queries * num_keys)
    # Query i sees keys 0 to i, and of these the last ones of a window.
    window = min(params["sliding_window_length"] or num_keys, num_keys)
    short = min(num_queries, window)
    return short * (short + 1) / 2 + (num_queries - short) * window


def _shape(operand: Operand) -> tuple[int, ...]:
    return operand.aval.shape if isinstance(operand, Value) else jnp.shape(operand.value)
