"""Rules of what routers and experts compute with: the largest elements, and products in groups."""

from __future__ import annotations

import jax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, block
from zeroxla.split.rules import Args, DimsOf, Rule, connect_unknown, fresh, note_sum, run_sum, same
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

    Rows and groups are needed whole: which rows belong to a group is known when the program runs.
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
    for dim in (*(lhs[i] for i in rows), *(rhs[j] for j in groups), *sizes):
        block(dim, "ragged_dot needs it whole")
    free = [dim for i, dim in enumerate(lhs) if i not in left]
    free += [dim for j, dim in enumerate(rhs) if j not in (*right, *groups)]
    return [tuple(free)]


def _run_ragged(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    ((left, _), _) = eq.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return run_sum(axis, eq, args, {i: dims[eq.inputs[0]][i] for i in left})


EXPERT_RULES = {
    "top_k": Rule(_connect_top_k),
    "ragged_dot_general": Rule(_connect_ragged, _run_ragged),
}
