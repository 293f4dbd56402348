"""Rules of equations that reshape or move elements, and of those that move a window."""

from __future__ import annotations

import math

import jax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import (
    Dim,
    Dims,
    block,
    dim_in_pieces,
    dim_of,
    expand,
    size_of,
)
from zeroxla.split.joins import cut
from zeroxla.split.rules import (
    Args,
    DimsOf,
    Rule,
    bind,
    connect_unknown,
    fresh,
    same,
    shape_of,
)
from zeroxla.split.split_axis import SplitAxis

MOST_SHIFTED = 4
"""The most elements that are left out of a row by a slice that only shifts it."""


def _connect_broadcast(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = list(fresh(eq.outputs[0]))
    sizes, shape = shape_of(eq.inputs[0]), eq.outputs[0].aval.shape
    for i, to in enumerate(eq.params["broadcast_dimensions"]):
        if sizes[i] == shape[to]:
            out[to] = ins[0][i]
    return [tuple(out)]


def _run_broadcast(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    return bind(eq, args, shape=_result_shape(axis, dims, eq))


def _connect_reshape(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = fresh(eq.outputs[0])
    if eq.params["dimensions"] is not None or 0 in eq.outputs[0].aval.shape:
        return connect_unknown(eq, ins)
    same(eq, sum(ins[0], ()), sum(out, ()))
    return [out]


def _run_reshape(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    return bind(eq, args, new_sizes=_result_shape(axis, dims, eq))


def _connect_transpose(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return [tuple(ins[0][i] for i in eq.params["permutation"])]


def _connect_squeeze(eq: Equation, ins: list[Dims]) -> list[Dims]:
    gone = {d % len(ins[0]) for d in eq.params["dimensions"]}
    return [tuple(dim for i, dim in enumerate(ins[0]) if i not in gone)]


def _connect_iota(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return [fresh(eq.outputs[0])]


def _run_iota(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    d, dim = eq.params["dimension"], dims[eq.outputs[0]][eq.params["dimension"]]
    shape = list(_result_shape(axis, dims, eq))
    shape[d] = eq.params["shape"][d]
    (whole,) = bind(eq, args, shape=tuple(shape))
    return [axis.take(whole, (*((),) * d, dim))]


def _sliced(dim: Dim, start: int, size: int) -> Dim:
    """Return the dim of a slice, which is a piece of the first; block both if that cannot be.

    A slice that leaves out a few elements of a row, like the last token of a sequence, is no piece:
    the dim would be cut wherever it occurs, and no axis could split it.
    """
    found, whole = dim, size_of(expand(dim))
    left = whole - size
    is_shifted = 0 < left <= min(MOST_SHIFTED, size // 4) and math.gcd(start, size, whole) == 1
    for at, keep in ((start, 1), (size, 0)):
        if not is_shifted and 0 < at < size_of(expand(found)):
            if (parts := cut(found, at)) is None:
                break
            found = parts[keep]
    if size_of(expand(found)) != size:
        found = dim_of(size)
        block((*dim, *found), "a slice cuts it")
    return found


def _connect_slice(eq: Equation, ins: list[Dims]) -> list[Dims]:
    start, limit = eq.params["start_indices"], eq.params["limit_indices"]
    strides = eq.params["strides"] or (1,) * len(start)
    out = []
    for dim, a, b, stride in zip(ins[0], start, limit, strides, strict=True):
        if stride == 1:
            out.append(_sliced(dim, a, b - a))
        else:
            out.append(dim_of(-(-(b - a) // stride)))
            block((*dim, *out[-1]), "a slice steps through it")
    return [tuple(out)]


def _run_slice(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    start, limit = list(eq.params["start_indices"]), list(eq.params["limit_indices"])
    for d, dim in enumerate(dims[eq.inputs[0]]):
        if axis.is_cut(dim):
            start[d], limit[d] = axis.place(dim, start[d]), axis.place(dim, limit[d])
    return bind(eq, args, start_indices=tuple(start), limit_indices=tuple(limit))


def _connect_pad(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out, configs = list(fresh(eq.outputs[0])), eq.params["padding_config"]
    for d, (dim, (low, high, inside)) in enumerate(zip(ins[0], configs, strict=True)):
        if inside or min(low, high) < 0 or shape_of(eq.inputs[0])[d] == 0:
            block((*dim, *out[d]), "pad makes it longer")
        else:
            pieces = (dim_of(low) if low else None, dim, dim_of(high) if high else None)
            out[d] = dim_in_pieces([piece for piece in pieces if piece is not None])
    return [tuple(out)]


def _run_pad(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    """Pad a part. The padding is a piece of the result, and may be split like any other."""
    configs = list(eq.params["padding_config"])
    (whole, _), (out,) = (dims[x] for x in eq.inputs), (dims[v] for v in eq.outputs)
    for d, (low, high, _) in enumerate(configs):
        if (low or high) and axis.is_cut(out[d]):
            before = axis.place(out[d], low)
            after = axis.dim_size(out[d]) - before - axis.dim_size(whole[d])
            configs[d] = (before, after, 0)
    return bind(eq, args, padding_config=tuple(configs))


def _connect_split(eq: Equation, ins: list[Dims]) -> list[Dims]:
    dim, start, outs = eq.params["axis"], 0, []
    for size in map(int, eq.params["sizes"]):
        outs.append([*ins[0]])
        outs[-1][dim] = _sliced(ins[0][dim], start, size)
        start += size
    return [tuple(out) for out in outs]


def _run_split(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    sizes = tuple(axis.dim_size(dims[v][eq.params["axis"]]) for v in eq.outputs)
    return bind(eq, args, sizes=sizes)


def _connect_dynamic_slice(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out = fresh(eq.outputs[0])
    for dim, new in zip(ins[0], out, strict=True):
        _window(eq, dim, new)
    return [out]


def _run_dynamic_slice(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    return bind(eq, args, slice_sizes=_result_shape(axis, dims, eq))


def _connect_dynamic_update(eq: Equation, ins: list[Dims]) -> list[Dims]:
    for dim, new in zip(*ins[:2], strict=True):
        _window(eq, dim, new)
    return [ins[0]]


def _connect_scatter(eq: Equation, ins: list[Dims]) -> list[Dims]:
    numbers = eq.params["dimension_numbers"]
    operand, indices, updates = ins
    if numbers.operand_batching_dims:
        return connect_unknown(eq, ins)
    windows = iter(numbers.update_window_dims)
    for d, dim in enumerate(operand):
        if d in numbers.inserted_window_dims:
            block(dim, f"{eq.name} moves along it")
        else:
            _window(eq, dim, updates[next(windows)])
    others = [dim for i, dim in enumerate(updates) if i not in numbers.update_window_dims]
    for dim, index in zip(others, indices[:-1], strict=True):
        same(eq, dim, index)
    block(indices[-1], f"{eq.name} needs it whole")
    return [operand]


def _window(eq: Equation, whole: Dim, window: Dim) -> None:
    """Join a window's dim with the whole dim if the window covers it; otherwise block both."""
    if size_of(expand(whole)) == size_of(expand(window)):
        same(eq, whole, window)
    else:
        block((*whole, *window), f"{eq.name} moves along it")


def _result_shape(axis: SplitAxis, dims: DimsOf, eq: Equation) -> tuple[int, ...]:
    """Return the shape of one part of an equation's only result."""
    return tuple(map(axis.dim_size, dims[eq.outputs[0]]))


RESHAPE_RULES: dict[str, Rule] = {
    "broadcast_in_dim": Rule(_connect_broadcast, _run_broadcast),
    "reshape": Rule(_connect_reshape, _run_reshape),
    "transpose": Rule(_connect_transpose),
    "squeeze": Rule(_connect_squeeze),
    "iota": Rule(_connect_iota, _run_iota),
    "slice": Rule(_connect_slice, _run_slice),
    "pad": Rule(_connect_pad, _run_pad),
    "split": Rule(_connect_split, _run_split),
    "dynamic_slice": Rule(_connect_dynamic_slice, _run_dynamic_slice),
    "dynamic_update_slice": Rule(_connect_dynamic_update),
    "scatter": Rule(_connect_scatter),
    "scatter-add": Rule(_connect_scatter),
}
