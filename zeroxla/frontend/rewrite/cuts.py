"""Which part of its operands an equation needs for a part of its result, and how it computes that.

From the cuts of a result (`cut_dims`) follow the cuts of the operands. An equation that has no such
rule is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend.rewrite.counted_bits import bits_of_block, can_count
from zeroxla.frontend.rewrite.cut_dims import (
    Cut,
    Cuts,
    Window,
    block_shape,
    has_flat,
    places,
    places_in_block,
    reshaped,
    shape_of,
)
from zeroxla.program import compat
from zeroxla.program.primitives import REDUCTIONS, SAME_PLACE
from zeroxla.program.trace import Equation, Operand

Hint = Callable[[Operand], Cuts | None]
"""The cuts of an operand that is reduced, if they are known."""


def operand_cuts(eq: Equation, cuts: Cuts, hint: Hint | None = None) -> list[Cuts] | None:
    """Return the cuts of an equation's operands; None if it has no rule for these cuts.

    Args:
      eq: an equation with one result.
      cuts: the cuts of the result.
      hint: the cuts of operands that are reduced along a cut dim. None: they are cut nowhere that
        the result is not.
    """
    if len(eq.outputs) != 1:
        return None
    if eq.name in SAME_PLACE:
        shape = eq.outputs[0].aval.shape
        # Operands may have dims of 1, and scalars stand beside arrays.
        return [
            tuple(cut if n == m else None for cut, n, m in zip(cuts, shape, own, strict=False))
            for own in map(shape_of, eq.inputs)
        ]
    if eq.name in REDUCTIONS:
        axes, rest = eq.params["axes"], iter(cuts)
        own = tuple(None if d in axes else next(rest) for d in range(len(shape_of(eq.inputs[0]))))
        return [_with_hint(own, axes, eq.inputs[0], hint)]
    rule = _RULES.get(eq.name)
    return None if rule is None else rule(eq, cuts, hint)


def _with_hint(own: Cuts, dims: Sequence[int], operand: Operand, hint: Hint | None) -> Cuts:
    """Return cuts in which dims that the result does not have are cut as a hint says."""
    known = None if hint is None else hint(operand)
    if known is None:
        return own
    return tuple(known[d] if d in dims else cut for d, cut in enumerate(own))


def _broadcast(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    shape, out = shape_of(eq.inputs[0]), eq.outputs[0].aval.shape
    dims = eq.params["broadcast_dimensions"]
    if len(eq.inputs) != 1:
        return None
    return [tuple(cuts[d] if shape[i] == out[d] else None for i, d in enumerate(dims))]


def _squeeze(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts]:
    rest, dims = iter(cuts), eq.params["dimensions"]
    return [tuple(None if d in dims else next(rest) for d in range(len(shape_of(eq.inputs[0]))))]


def _transpose(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts]:
    found: list[Cut | None] = [None] * len(cuts)
    for cut, d in zip(cuts, eq.params["permutation"], strict=True):
        found[d] = cut
    return [tuple(found)]


def _reshape(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    if eq.params.get("dimensions") is not None or len(eq.inputs) != 1:
        return None
    found = reshaped(cuts, eq.outputs[0].aval.shape, shape_of(eq.inputs[0]))
    return None if found is None else [found]


def _slice(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    params, found = eq.params, []
    strides = params["strides"] or (1,) * len(cuts)
    shapes = zip(shape_of(eq.inputs[0]), eq.outputs[0].aval.shape, strict=True)
    starts = params["start_indices"]
    for cut, first, stride, (n, of_n) in zip(cuts, starts, strides, shapes, strict=True):
        if cut is not None and (stride != 1 or (cut.is_flat and n != of_n)):
            return None
        found.append(None if cut is None else cut._replace(first=cut.first + first))
    return [tuple(found)]


def _concatenate(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    return None if cuts[eq.params["dimension"]] is not None else [cuts] * len(eq.inputs)


def _iota(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    return None if eq.inputs else []


def _random_bits(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    return [()] if can_count(eq) and not has_flat(cuts) else None


def _dot_general(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    found = [[None if d is None else cuts[d] for d in dims] for dims in dot_dims(eq)]
    known = [None if hint is None else hint(x) for x in eq.inputs]
    for pair in zip(*eq.params["dimension_numbers"][0], strict=True):
        cut = next((own[d] for own, d in zip(known, pair, strict=True) if own is not None), None)
        for own, d in zip(found, pair, strict=True):
            own[d] = cut
    return [tuple(own) for own in found]


def dot_dims(eq: Equation) -> list[list[int | None]]:
    """Return for each dim of the two operands of a `dot_general` its dim in the result; None for
    contracted ones."""
    (contracted, batch), shapes = eq.params["dimension_numbers"], [shape_of(x) for x in eq.inputs]
    found: list[list[int | None]] = []
    following = len(batch[0])
    for shape, summed, shared in zip(shapes, contracted, batch, strict=True):
        dims: list[int | None] = []
        for i in range(len(shape)):
            if i in summed:
                dims.append(None)
            elif i in shared:
                dims.append(list(shared).index(i))
            else:
                dims.append(following)
                following += 1
        found.append(dims)
    return found


def _gather(eq: Equation, cuts: Cuts, hint: Hint | None) -> list[Cuts] | None:
    """Indices are cut, or dims of the table that are taken whole."""
    numbers, sizes = eq.params["dimension_numbers"], eq.params["slice_sizes"]
    table, indices = (shape_of(x) for x in eq.inputs)
    places = iter(cut for d, cut in enumerate(cuts) if d not in numbers.offset_dims)
    of_indices = (*(next(places) for _ in indices[:-1]), None)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offsets, own = iter(numbers.offset_dims), []
    for d, n in enumerate(table):
        cut = None if d in gone else cuts[next(offsets)]
        if cut is not None and (d in numbers.start_index_map or sizes[d] != n):
            return None
        own.append(cut)
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for d, of_index in batching:
        own[d] = of_indices[of_index]
    looked_up = [d for d in numbers.start_index_map if sizes[d] == 1]
    return [_with_hint(tuple(own), looked_up, eq.inputs[0], hint), of_indices]


_RULES: dict[str, Callable[[Equation, Cuts, Hint | None], list[Cuts] | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "gather": _gather,
    "iota": _iota,
    "random_bits": _random_bits,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "transpose": _transpose,
}


def compute(
    eq: Equation, cuts: Cuts, of_operands: Sequence[Cuts], window: Window, args: Sequence[Any]
) -> jax.Array:
    """Compute a block of an equation's result from the blocks of its operands.

    Args:
      eq: the equation.
      cuts: the cuts of the result.
      of_operands: the cuts of the operands, from `operand_cuts`.
      window: the block.
      args: the operands' blocks.
    """
    shape = block_shape(eq.outputs[0].aval.shape, cuts, window)
    params = eq.params
    if eq.name == "iota":
        d = params["dimension"]
        cut = cuts[d]
        if cut is None:
            return lax.broadcasted_iota(params["dtype"], shape, d)
        if not cut.is_flat:
            own = lax.broadcasted_iota(params["dtype"], shape, d)
            return own + jnp.asarray(window[cut.label][0] + cut.first).astype(params["dtype"])
        length = cut.length(eq.outputs[0].aval.shape[d])
        own = places(shape[d], cut, length, window).astype(params["dtype"])
        return lax.broadcast_in_dim(own, shape, (d,))
    if eq.name == "broadcast_in_dim":
        return lax.broadcast_in_dim(args[0], shape, params["broadcast_dimensions"])
    if eq.name == "reshape":
        return lax.reshape(args[0], shape)
    if eq.name == "random_bits":
        firsts = [0 if cut is None else window[cut.label][0] + cut.first for cut in cuts]
        return bits_of_block(args[0], params["bit_width"], params["shape"], firsts, shape)
    if eq.name == "name":  # the policies of `jax.checkpoint` are for whole arrays
        return args[0]
    changed: dict[str, Any] = {}
    if eq.name == "slice":
        pairs = list(zip(cuts, params["start_indices"], shape, strict=True))
        starts = tuple(first if cut is None else 0 for cut, first, _ in pairs)
        strides = params["strides"] or (1,) * len(cuts)
        limits = tuple(
            limit if cut is None else n
            for (cut, _, n), limit in zip(pairs, params["limit_indices"], strict=True)
        )
        return lax.slice(args[0], starts, limits, strides)
    if eq.name == "gather":
        args = [args[0], _moved_indices(eq, of_operands[0], window, args[1])]
        pairs = zip(params["slice_sizes"], shape_of(eq.inputs[0]), args[0].shape, strict=True)
        sizes = tuple(now if n == whole and n > 1 else n for n, whole, now in pairs)
        changed = {"slice_sizes": sizes}
    bound = compat.bind_params(eq.source.primitive, {**params, **changed})
    found = eq.source.primitive.bind(*args, **bound)
    return found[0] if eq.source.primitive.multiple_results else found


def _moved_indices(eq: Equation, table: Cuts, window: Window, indices: jax.Array) -> jax.Array:
    """Return indices of places in the block of a table, from those of places in the whole table.

    Indices that follow from positions, as in `logprobs[arange(positions), labels]`, move with them.
    That they follow so, a small instance shows.
    """
    moved = []
    for k, d in enumerate(eq.params["dimension_numbers"].start_index_map):
        cut, at = table[d], indices[..., k]
        if cut is not None:
            first, _ = window[cut.label]
            if cut.is_flat or not isinstance(first, int) or first + cut.first != 0:
                length = cut.length(shape_of(eq.inputs[0])[d])
                at = jnp.where(at < 0, at, places_in_block(at, cut, length, window))
        moved.append(at.astype(indices.dtype))
    return jnp.stack(moved, axis=-1)
