"""Rules of what routers and experts compute with: the largest elements, and products in groups."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dim, Dims, block, is_split
from zeroxla.split.rules import (
    Args,
    DimsOf,
    Rule,
    connect_unknown,
    fresh,
    note_sum,
    run_sum,
    same,
    shape_of,
)
from zeroxla.split.split_axis import SplitAxis


def _connect_top_k(eq: Equation, ins: list[Dims]) -> list[Dims]:
    (dims,) = ins
    axis = eq.params.get("axis", len(dims) - 1) % len(dims)
    outs = [list(fresh(v)) for v in eq.outputs]
    for d, dim in enumerate(dims):
        for out in outs:
            if d == axis:
                block((*dim, *out[d]), "top_k goes through it")
            else:
                same(eq, out[d], dim)
    return [tuple(out) for out in outs]


def _connect_ragged(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join the dims of products of consecutive rows with one matrix for each group.

    Rows may be split: then the sizes of the groups are counted anew. Parts of groups have no part
    of the rows that is known before the program runs; training can split them all the same (see
    `ragged`).
    """
    numbers = eq.params["ragged_dot_dimension_numbers"]
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    rows, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    lhs, rhs, sizes, *rest = ins
    if left_batch or right_batch or len(groups) != 1 or set(rows) & set(left) or rest:
        return connect_unknown(eq, ins)
    for i, j in zip(left, right, strict=True):
        same(eq, lhs[i], rhs[j])
        note_sum(lhs[i], eq)
    for dim in (*(lhs[i] for i in rows if len(rows) > 1), *(rhs[j] for j in groups), *sizes):
        block(dim, "ragged_dot needs it whole")
    free = [dim for i, dim in enumerate(lhs) if i not in left]
    free += [dim for j, dim in enumerate(rhs) if j not in (*right, *groups)]
    return [tuple(free)]


def _run_ragged(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    numbers, (lhs, rhs, sizes, *rest) = eq.params["ragged_dot_dimension_numbers"], args
    ((left, _), _), whole = numbers.dot_dimension_numbers, dims[eq.inputs[0]]
    if (known := group_dims(eq)) is not None:
        rows, groups, _ = known
        if is_split(dims[eq.inputs[1]][groups]):  # the rows are those of this device's groups
            sizes = lax.dynamic_slice_in_dim(
                sizes, axis.index * rhs.shape[groups], rhs.shape[groups]
            )
        elif is_split(whole[rows]):
            sizes = _sizes_in_part(axis, whole[rows], sizes)
    return run_sum(axis, eq, (lhs, rhs, sizes, *rest), {i: whole[i] for i in left})


def _sizes_in_part(axis: SplitAxis, dim: Dim, sizes: jax.Array) -> jax.Array:
    """Return how many rows of each group are in a device's part of the rows."""
    num_rows = dataclasses.replace(axis, parts=1).dim_size(dim)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows), side="right")
    here = axis.take_along(group, 0, dim)
    return (here == jnp.arange(sizes.shape[0])[:, None]).sum(1, dtype=sizes.dtype)


def group_dims(eq: Equation) -> tuple[int, int, int] | None:
    """Return the number of the dim of rows, that of the dim of groups of the matrices, and that of
    the dim of rows of the result; None if an equation is no such product, or another kind."""
    if eq.name != "ragged_dot_general":
        return None
    numbers = eq.params["ragged_dot_dimension_numbers"]
    (left, _), batch = numbers.dot_dimension_numbers
    rows, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    is_known = len(rows) == len(groups) == 1 and not any(batch) and rows[0] not in left
    if not is_known or len(eq.inputs) != 3 or len(shape_of(eq.inputs[2])) != 1:
        return None
    free = [i for i in range(len(shape_of(eq.inputs[0]))) if i not in left]
    return rows[0], groups[0], free.index(rows[0])


EXPERT_RULES = {
    "top_k": Rule(_connect_top_k),
    "ragged_dot_general": Rule(_connect_ragged, _run_ragged),
}
