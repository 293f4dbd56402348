"""What each kind of equation says about dims, and how it runs on parts.

A `Rule` has two sides, which must agree:

* `connect` joins the atoms of operands and results that must be split together. It blocks the atoms
  that the equation needs whole.
* `run` computes one part of the results from one part of the operands. Where an equation's
  parameters name shapes, `run` puts the shapes of the parts in their place. Where the equation sums
  over a split atom, `run` adds the sum over the parts.

An equation without a rule needs its operands whole and runs unchanged. The rules are in
`elementwise`, `reshapes` and `products`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.program.trace import Equation, Operand, Value
from zeroxla.split.atoms import Dim, Dims, atoms_in, block, dims_of, is_split
from zeroxla.split.joins import join
from zeroxla.split.split_axis import SplitAxis

Args = Sequence[jax.Array]
DimsOf = Mapping[Operand, Dims]
"""The dims of every operand and result of a program."""
Connect = Callable[[Equation, list[Dims]], list[Dims]]
"""(equation, dims of its operands) -> dims of its results."""
Run = Callable[[SplitAxis, DimsOf, Equation, Args], list[jax.Array]]
"""(axis, dims, equation, parts of its operands) -> parts of its results."""


def bind(eq: Equation, args: Args, **changed: Any) -> list[jax.Array]:
    """Run an equation, with some of its parameters changed."""
    out = eq.source.primitive.bind(*args, **{**eq.params, **changed})
    return list(out) if eq.source.primitive.multiple_results else [out]


def run_as_is(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    """Run an equation whose parameters name no shape."""
    del axis, dims
    return bind(eq, args)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one kind of equation; the top of the file explains its two sides."""

    connect: Connect
    run: Run = run_as_is


def fresh(value: Value) -> Dims:
    """Return new dims for a value; nothing is known about them."""
    return dims_of(value.aval.shape)


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return tuple(operand.aval.shape if isinstance(operand, Value) else jnp.shape(operand.value))


def same(eq: Equation, a: Dim, b: Dim) -> None:
    """Join two dims that an equation makes one."""
    join(a, b, f"{eq.name} regroups it")


def note_sum(dim: Dim, eq: Equation, kind: str = "is_contracted") -> None:
    """Note that an equation sums along a dim, or looks up in it.

    If the dim is split, all elements of the result are summed over the parts.
    """
    for atom in atoms_in(dim):
        atom.sums.append(math.prod(eq.outputs[0].aval.shape))
        setattr(atom, kind, True)


def run_sum(
    axis: SplitAxis, eq: Equation, args: Args, summed: Mapping[int, Dim], **changed: Any
) -> list[jax.Array]:
    """Run a product of two arrays, and sum it over the parts if one of its sums is split.

    Args:
      axis: the axis of the parts.
      eq: the product.
      args: parts of its operands.
      summed: the dims that it sums along, by their number in its first operand.
      **changed: parameters to change.
    """
    split = {d: dim for d, dim in summed.items() if is_split(dim)}
    if not split:
        return bind(eq, args, **changed)
    first, *others = args
    for d, dim in split.items():
        first = axis.counted_once(first, d, dim)
    # The parts are summed in float32 and rounded once, as the whole product would be. A sum that is
    # left to the caller travels in the product's dtype: each summand is rounded.
    dtype = eq.outputs[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    if "preferred_element_type" in eq.params:
        changed["preferred_element_type"] = wide
    (part,) = bind(eq, (first, *others), **changed)
    return [axis.sum(part).astype(dtype)]


def connect_unknown(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Block every dim: an equation without a rule needs all of them whole."""
    outs = [fresh(v) for v in eq.outputs]
    for dims in (*ins, *outs):
        for dim in dims:
            block(dim, f"{eq.name} needs it whole")
    return outs


UNKNOWN = Rule(connect_unknown)
