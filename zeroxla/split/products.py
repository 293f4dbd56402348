"""Rules of the equations that sum over leaf dims: products and lookups. See `rules`.

A contracted dim that is split makes the result a sum over the parts, one psum. So does a lookup in
a table whose rows are split: each device has zeros for the rows of the others.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dim, Dims, block, expand, splits
from zeroxla.split.elementwise import MAPPING
from zeroxla.split.reshapes import SHAPES
from zeroxla.split.rules import (
    UNKNOWN,
    Args,
    Parts,
    Rule,
    bind,
    connect_unknown,
    fresh,
    same,
    shape_of,
)


def rule_of(eq: Equation) -> Rule:
    """Return the rule of an equation, that of the unknown ones if it has none."""
    return ALL.get(eq.name, UNKNOWN)


def connect_dot(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join what is contracted, and what is a batch; the result has batches, then the free dims."""
    (left, right), (left_batch, right_batch) = eq.params["dimension_numbers"]
    lhs, rhs = ins
    for i, j in (*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)):
        same(eq, lhs[i], rhs[j])
    for i in left:
        _summed(lhs[i], eq)
        for atom in expand(lhs[i]):
            atom.is_contracted = True
    free = [d for i, d in enumerate(lhs) if i not in (*left, *left_batch)]
    free += [d for i, d in enumerate(rhs) if i not in (*right, *right_batch)]
    return [(*(lhs[i] for i in left_batch), *free)]


def _run_dot(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    (left, _), _ = eq.params["dimension_numbers"]
    dims = parts.dims(eq.inputs[0])
    if not any(splits(dims[i]) for i in left):
        return bind(eq, args)
    # Halves are summed as float32 and rounded once, as a product of the whole would be.
    dtype = eq.outputs[0].aval.dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    (part,) = bind(eq, args, preferred_element_type=wide)
    return [parts.sum(part).astype(dtype)]


def _summed(dim: Dim, eq: Equation) -> None:
    for atom in expand(dim):
        atom.sums.append(math.prod(eq.outputs[0].aval.shape))


def _connect_gather(eq: Equation, ins: list[Dims]) -> list[Dims]:
    numbers, sizes = eq.params["dimension_numbers"], eq.params["slice_sizes"]
    if numbers.operand_batching_dims:
        return connect_unknown(eq, ins)
    table, indices = ins
    out = list(fresh(eq.outputs[0]))
    windows = iter(numbers.offset_dims)
    for d, dim in enumerate(table):
        window = None if d in numbers.collapsed_slice_dims else next(windows)
        if sizes[d] == shape_of(eq.inputs[0])[d] and window is not None:
            same(eq, out[window], dim)
        elif numbers.start_index_map == (d,) and sizes[d] == 1 and eq.outputs[0].is_float:
            _summed(dim, eq)
            for atom in expand(dim):
                atom.is_table = True
        else:
            block((*dim, *(out[window] if window is not None else ())), "gather moves along it")
    batch = [i for i in range(len(out)) if i not in numbers.offset_dims]
    for i, dim in zip(batch, indices[:-1], strict=True):
        same(eq, out[i], dim)
    block(indices[-1], "gather needs it whole")
    return [tuple(out)]


def _run_gather(parts: Parts, eq: Equation, args: Args) -> list[jax.Array]:
    numbers, mode = eq.params["dimension_numbers"], eq.params["mode"]
    dims = parts.dims(eq.inputs[0])
    sizes = tuple(
        n if n == 1 else parts.part(dim)
        for n, dim in zip(eq.params["slice_sizes"], dims, strict=True)
    )
    rows = numbers.start_index_map[0] if len(numbers.start_index_map) == 1 else None
    if rows is None or not splits(dims[rows]) or sizes[rows] != 1:
        return bind(eq, args, slice_sizes=sizes)
    table, indices = args
    num, mine = shape_of(eq.inputs[0])[rows], table.shape[rows]
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, num - 1)
    here = indices - parts.index * mine
    clip = lax.GatherScatterMode.CLIP
    (found,) = bind(eq, (table, here), slice_sizes=sizes, mode=clip)

    def spread(flags: jax.Array) -> jax.Array:
        batch = [i for i in range(found.ndim) if i not in numbers.offset_dims]
        return lax.broadcast_in_dim(flags[..., 0], found.shape, batch)

    found = parts.sum(jnp.where(spread((here >= 0) & (here < mine)), found, 0))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:  # As jnp.take: NaN out of the table.
        missing = jnp.nan if eq.params["fill_value"] is None else eq.params["fill_value"]
        found = jnp.where(spread((indices >= 0) & (indices < num)), found, missing)
    return [found]


ALL: dict[str, Rule] = {
    **MAPPING,
    **SHAPES,
    "dot_general": Rule(connect_dot, _run_dot),
    "gather": Rule(_connect_gather, _run_gather),
}
