"""The FLOPs of equations: of products exactly, of factorizations by the usual counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.branches import While, branches_of
from zeroxla.program.primitives import ATTENTION_BACKWARD, ATTENTION_FORWARD, FACTORIZATION_FLOPS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value


def flops_of(eq: Equation) -> float:
    """Return the FLOPs of an equation, those of its loops and branches included.

    A product counts its multiplications and additions, a factorization what LAPACK's does, and
    every other equation one for each element of its results. Of branches the most expensive one
    counts, and a `while` loop counts as one turn, because the number of its turns depends on data.
    """
    return _with_inner(eq, _flops)


def all_product_flops(eq: Equation) -> float:
    """Return the FLOPs of an equation as `flops_of` does, but of products and convolutions alone:
    what the utilization of a device (MFU) counts."""
    return _with_inner(eq, product_flops)


def _with_inner(eq: Equation, flops: Callable[[Equation], float]) -> float:
    """Return the FLOPs of an equation by a rule for those without equations inside."""

    def all_of(program: Program) -> float:
        return sum(_with_inner(inner, flops) for inner in program.equations)

    if eq.name == "scan":
        scan = Scan(eq)
        return scan.length * all_of(scan.body(compat.forward_jaxpr))
    if eq.name == "while":
        loop = While(eq)
        return all_of(loop.test()) + all_of(loop.body())
    if eq.name == "cond":
        return max(map(all_of, branches_of(eq)), default=0.0)
    return flops(eq)


def _flops(eq: Equation) -> float:
    if eq.name in FACTORIZATION_FLOPS and eq.values and len(shape := _shape(eq.inputs[0])) > 1:
        *batch, m, n = shape
        # A solve also goes through the columns of its right-hand side.
        wide = _shape(eq.inputs[1])[-1] if len(eq.inputs) > 1 else n
        return FACTORIZATION_FLOPS[eq.name] * math.prod(batch) * m * n * min(m, wide)
    elements = float(sum(v.aval.size for v in eq.outputs))
    return product_flops(eq) or elements


def product_flops(eq: Equation) -> float:
    """Return the FLOPs of a product or convolution, a multiplication and an addition each; 0 for
    every other equation."""
    (out, *_) = eq.outputs
    if eq.name == "dot_general":
        (contracted, _), _ = eq.params["dimension_numbers"]
        shape = _shape(eq.inputs[0])
        return 2.0 * out.aval.size * math.prod(shape[d] for d in contracted)
    if eq.name == "ragged_dot_general":
        return _ragged_flops(eq)
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


def _ragged_flops(eq: Equation) -> float:
    """Return the FLOPs of a product of groups of rows with a matrix each: every row meets the
    matrix of its own group alone."""
    numbers = eq.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    beside = {*contracted, *batch, *numbers.rhs_group_dimensions}
    right = _shape(eq.inputs[1])
    free = (size for dim, size in enumerate(right) if dim not in beside)
    return 2.0 * math.prod(_shape(eq.inputs[0])) * math.prod(free)


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
