"""Rules of products and lookups, the equations that sum over leaf dims; and the table of all rules.

If a contracted dim is split, the result is a sum over the parts: one `psum`. So is a lookup in a
table whose rows are split: each device contributes zeros for rows that other devices hold.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dim, Dims, block, expand, is_split, pieces_of
from zeroxla.split.attention import ATTENTION_RULES
from zeroxla.split.collective_rules import COLLECTIVE_RULES
from zeroxla.split.convolutions import CONVOLUTION_RULES
from zeroxla.split.elementwise import ELEMENTWISE_RULES
from zeroxla.split.expert_rules import EXPERT_RULES
from zeroxla.split.factorizations import FACTORIZATION_RULES
from zeroxla.split.reshapes import RESHAPE_RULES
from zeroxla.split.rules import (
    UNKNOWN,
    Args,
    DimsOf,
    Rule,
    bind,
    fresh,
    note_sum,
    run_sum,
    same,
    shape_of,
)
from zeroxla.split.running import RUNNING_RULES
from zeroxla.split.split_axis import SplitAxis


def rule_of(eq: Equation) -> Rule:
    """Return an equation's rule; `UNKNOWN` if there is none for its kind."""
    return RULES.get(eq.name, UNKNOWN)


def connect_dot(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join contracted dims, and batch dims. The result has the batch dims, then the free ones."""
    (left, right), (left_batch, right_batch) = eq.params["dimension_numbers"]
    lhs, rhs = ins
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        same(eq, lhs[i], rhs[j])
    for i in left:
        note_sum(lhs[i], eq)
    free = [d for i, d in enumerate(lhs) if i not in (*left, *left_batch)]
    free += [d for i, d in enumerate(rhs) if i not in (*right, *right_batch)]
    return [(*(lhs[i] for i in left_batch), *free)]


def _run_dot(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    (left, _), _ = eq.params["dimension_numbers"]
    return run_sum(axis, eq, args, {i: dims[eq.inputs[0]][i] for i in left})


def _connect_gather(eq: Equation, ins: list[Dims]) -> list[Dims]:
    numbers, sizes = eq.params["dimension_numbers"], eq.params["slice_sizes"]
    table, indices = ins
    out = list(fresh(eq.outputs[0]))
    windows = iter(numbers.offset_dims)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for d, dim in enumerate(table):
        window = None if d in gone else next(windows)
        if d in numbers.operand_batching_dims:
            at = numbers.operand_batching_dims.index(d)
            same(eq, dim, indices[numbers.start_indices_batching_dims[at]])
        elif sizes[d] == shape_of(eq.inputs[0])[d] and window is not None:
            same(eq, out[window], dim)
        elif numbers.start_index_map == (d,) and sizes[d] == 1 and eq.outputs[0].is_float:
            if any(map(pieces_of, expand(dim))):
                block(dim, "a slice cuts the table")
            note_sum(dim, eq, kind="is_table")
        else:
            block((*dim, *(out[window] if window is not None else ())), "gather moves along it")
    batch = [i for i in range(len(out)) if i not in numbers.offset_dims]
    for i, dim in zip(batch, indices[:-1], strict=True):
        same(eq, out[i], dim)
    block(indices[-1], "gather needs it whole")
    return [tuple(out)]


def _run_gather(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    numbers, mode = eq.params["dimension_numbers"], eq.params["mode"]
    of_table = dims[eq.inputs[0]]
    taken = zip(eq.params["slice_sizes"], shape_of(eq.inputs[0]), of_table, strict=True)
    sizes = tuple(axis.dim_size(dim) if 1 < n == whole else n for n, whole, dim in taken)
    rows = numbers.start_index_map[0] if len(numbers.start_index_map) == 1 else None
    if rows is None or not is_split(of_table[rows]) or sizes[rows] != 1:
        return bind(eq, args, slice_sizes=sizes)
    table, indices = args
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        indices = indices.astype(jnp.int32)
    num = dataclasses.replace(axis, parts=1).dim_size(of_table[rows])
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, num - 1)
    is_inside = (indices >= 0) & (indices < num)
    places, is_here = _places_in_part(axis, of_table[rows], indices)
    clip = lax.GatherScatterMode.CLIP
    (found,) = bind(eq, (table, places), slice_sizes=sizes, mode=clip)

    def spread(flags: jax.Array) -> jax.Array:
        batch = [i for i in range(found.ndim) if i not in numbers.offset_dims]
        return lax.broadcast_in_dim(flags[..., 0], found.shape, batch)

    found = axis.sum(jnp.where(spread(is_here & is_inside), found, 0))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # Like jnp.take: NaN outside of the table.
        missing = jnp.nan if eq.params["fill_value"] is None else eq.params["fill_value"]
        if axis.defers:  # as a summand, on one device
            missing = jnp.where(axis.index == 0, missing, 0)
        found = jnp.where(spread(is_inside), found, missing)
    return [found]


def _places_in_part(axis: SplitAxis, dim: Dim, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return where places in a whole dim are in a device's part of it, and whether they are.

    The split factor of the dim need not be its first: tokens that are numbered through rows and
    positions, and split along positions, are one run of places for each row.
    """
    atoms = expand(dim)
    (k,) = (k for k, atom in enumerate(atoms) if atom.chosen)
    inner, mine = axis.dim_size(atoms[k + 1 :]), axis.atom_size(atoms[k])
    size = dataclasses.replace(axis, parts=1).atom_size(atoms[k])
    outside, rest = jnp.divmod(places, size * inner)
    at, inside = jnp.divmod(rest, inner)
    at = at - axis.index * mine
    return (outside * mine + at) * inner + inside, (at >= 0) & (at < mine)


RULES: dict[str, Rule] = {
    **ELEMENTWISE_RULES,
    **RESHAPE_RULES,
    **ATTENTION_RULES,
    **CONVOLUTION_RULES,
    **COLLECTIVE_RULES,
    **EXPERT_RULES,
    **RUNNING_RULES,
    **FACTORIZATION_RULES,
    "dot_general": Rule(connect_dot, _run_dot),
    "gather": Rule(_connect_gather, _run_gather),
}
