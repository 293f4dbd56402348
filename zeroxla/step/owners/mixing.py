"""`mixes`: tells equations that need whole matrices from those that XLA computes part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from zeroxla.program import compat
from zeroxla.program.branches import While, branches_of
from zeroxla.program.primitives import PARTITIONED
from zeroxla.program.trace import Equation, Operand, Program, Value
from zeroxla.program.walk import bodies, body_of


def mixes(eq: Equation) -> bool:
    """Return whether an equation combines the elements of an array so that devices would need it
    whole.

    Products of two matrices and factorizations do, and so does every loop or branch with one of
    these in it. Element by element an array needs nothing from other devices. A sum over an array,
    or its product with a vector, needs a small sum over the devices, which is left to XLA.
    """
    if eq.name == "dot_general":
        return _is_product_of_matrices(eq)
    inside = programs_inside(eq)
    if inside:
        return any(mixes(inner) for program in inside for inner in program.equations)
    return eq.name not in PARTITIONED and any(v.aval.size > 1 for v in eq.values)


def programs_inside(eq: Equation) -> list[Program]:
    """Return the programs that an equation runs, as loops and branches do; none for others."""
    if (body := compat.forward_jaxpr(eq.source)) is not None:  # a derivative of its own
        return [body_of(body)]
    if eq.name == "cond":
        return branches_of(eq)
    if eq.name == "while":
        return [While(eq).test(), While(eq).body()]
    return [body for body, _ in bodies(eq)]


def _is_product_of_matrices(eq: Equation) -> bool:
    """Return whether a product sums over a dim, and both operands have a dim besides."""
    contracted, batch = eq.params["dimension_numbers"]
    pairs = zip(eq.inputs, contracted, batch, strict=True)
    sides = [_sizes(_shape(x), summed, along) for x, summed, along in pairs]
    return all(summed > 1 and free > 1 for summed, free in sides)


def _sizes(shape: Sequence[int], summed: Sequence[int], batch: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of elements along the summed dims, and along those that are neither summed
    nor batch dims."""
    free = [n for d, n in enumerate(shape) if d not in (*summed, *batch)]
    return math.prod(shape[d] for d in summed), math.prod(free)


def _shape(operand: Operand) -> tuple[int, ...]:
    return operand.aval.shape if isinstance(operand, Value) else jnp.shape(operand.value)
