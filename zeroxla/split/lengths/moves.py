"""Equations that move elements along a sequence, on arrays with padding.

A slice that leaves out a few elements, such as the last token, only makes padding of them. What
shifts a sequence stays as long as it was. One element of a sequence is a sum in which the others
are zeros. Each second element is a slice of a reshaped array. So all arrays of a sequence keep a
length that an axis divides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program import compat
from zeroxla.program.trace import Equation, is_float
from zeroxla.split.lengths.known_lengths import KnownLengths
from zeroxla.split.lengths.padded import Length, Padded, size_of
from zeroxla.split.lengths.shifts import each, one_of, places, shifted, spread
from zeroxla.split.reshapes import MOST_SHIFTED

Move = Callable[[KnownLengths, Equation, Sequence[Padded]], list[Padded] | None]
"""(known lengths, equation, operands) -> results; None if the equation needs something else."""


def _slice(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    (x,), params = ins, eq.params
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    shape = [_size(x, d) for d in range(len(starts))]
    cut = [d for d, n in enumerate(shape) if limits[d] - starts[d] != n or strides[d] != 1]
    along = [d for d in cut if x.along(d) is not None]
    if len(along) != 1:
        return None
    (d,) = along
    if not is_float(x.array.dtype):  # An axis may have them whole.
        (found,) = _as_is(eq, [x.without({x.along(d)})])
        return [_as_sequence(known, found, d)]
    y = _along(known, x, d, starts[d], limits[d], strides[d])
    if y is None:
        return None
    known.moves.append(eq.name)
    for other in cut:
        if other != d:
            array = lax.slice_in_dim(
                y.array, starts[other], limits[other], strides[other], axis=other
            )
            size = array.shape[other]
            y = _with_dim(y, other, array, (size,) if size != 1 else ())
    return [y]


def _along(
    known: KnownLengths, x: Padded, d: int, start: int, limit: int, stride: int
) -> Padded | None:
    """Return a slice along a sequence; None if it is neither a few elements nor almost all."""
    length = x.along(d)
    assert length is not None
    size = -(-(limit - start) // stride)
    if stride == 1 and size <= MOST_SHIFTED:
        picked = [one_of(x.array, d, i) for i in range(start, limit)]
        array = picked[0] if size == 1 else lax.concatenate(picked, d)
        return _with_dim(x, d, array, (size,) if size != 1 else ())
    first, held = start // stride, length.held // stride
    if length.held % stride or not known.is_long(size) or not 0 <= held - size <= MOST_SHIFTED:
        return None
    found = known.noted(Length(size, held))
    if stride > 1:
        x = dataclasses.replace(x, array=each(x.array, d, stride, start % stride))
    return _with_dim(x, d, shifted(x.array, d, -first, None), (found,))


def _split(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    (x,), d = ins, eq.params["axis"]
    sizes = [int(n) for n in eq.params["sizes"]]
    if x.along(d) is None or not is_float(x.array.dtype):
        return None
    start, found = 0, []
    for size in sizes:
        piece = _along(known, x, d, start, start + size, 1) if size else None
        if piece is None:
            return None
        found.append(piece)
        start += size
    known.moves.append(eq.name)
    return found


def _pad(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    (x, value), configs = ins, eq.params["padding_config"]
    along = [d for d, each in enumerate(configs) if any(each) and x.along(d) is not None]
    if len(along) != 1 or not is_float(x.array.dtype):
        return None
    (d,) = along
    low, high, inside = map(int, configs[d])
    length = x.along(d)
    assert length is not None
    size = low + length.size + (length.size - 1) * inside + high
    held = length.held * (inside + 1)
    fits = 0 <= held - size <= MOST_SHIFTED and max(abs(low), abs(high)) <= MOST_SHIFTED
    if not fits or not known.is_long(size) or (inside and not 0 <= low <= inside):
        return None
    known.moves.append(eq.name)
    found = known.noted(Length(size, held))
    if inside:
        y = _with_dim(x, d, spread(x.array, d, inside + 1, low, value.array), (found,))
    else:
        y = _with_dim(x, d, shifted(x.array, d, low, value.array), (found,))
    last = low + length.size + (length.size - 1) * inside
    if high > 0 and held != last:
        array = jnp.where(places(y.array, d) < last, y.array, value.array)
        y = dataclasses.replace(y, array=array)
    rest = [(0, 0, 0) if i == d else tuple(each) for i, each in enumerate(configs)]
    if any(map(any, rest)):
        array = lax.pad(y.array, value.array, rest)
        dims = [
            (array.shape[i],) if any(each) else dim
            for i, (each, dim) in enumerate(zip(rest, y.dims, strict=True))
        ]
        y = dataclasses.replace(y, array=array, dims=tuple(dims))
    return [dataclasses.replace(y, is_computed=x.is_computed or value.is_computed)]


def _concatenate(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    d = eq.params["dimension"]
    is_computed = any(x.is_computed for x in ins)
    joined = _around_one(known, ins, d)
    if joined is not None:
        known.moves.append(eq.name)
        return [dataclasses.replace(joined, is_computed=is_computed)]
    has_rows = 0 < d < len(ins[0].dims) - 1 and is_computed
    if not has_rows or not is_float(ins[0].array.dtype):
        return None
    lengths = {f for x in ins for f in x.dims[d] if isinstance(f, Length)}
    (found,) = _as_is(eq, [x.without(lengths) for x in ins])
    return [_as_sequence(known, found, d)]


def _around_one(known: KnownLengths, ins: Sequence[Padded], d: int) -> Padded | None:
    """Return a sequence with a few elements before and after it; None if it is not so."""
    (at, *others) = [i for i, x in enumerate(ins) if x.along(d) is not None] or [None]
    if at is None or others or not is_float(ins[at].array.dtype):
        return None
    sizes = [_size(x, d) for x in ins]
    length = ins[at].along(d)
    assert length is not None
    size, before = sum(sizes), sum(sizes[:at])
    if (
        not known.is_long(size)
        or size > length.held
        or size - length.size > MOST_SHIFTED
        or length.held - size > MOST_SHIFTED
    ):
        return None
    dims = list(ins[at].dims)
    dims[d] = (known.noted(Length(size, length.held)),)
    array = shifted(ins[at].array, d, before, None)
    place, at_d = 0, places(array, d)
    for i, x in enumerate(ins):
        if i != at:
            own = x.as_dims([o if e == d else dims[e] for e, o in enumerate(x.dims)])
            for k in range(sizes[i]):
                one = lax.slice_in_dim(own.array, k, k + 1, axis=d)
                array = jnp.where(at_d == place + k, one, array)
        place += sizes[i]
    return Padded(array, tuple(dims))


def _iota(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    del ins
    return _made(known, eq, range(len(eq.params["shape"])), lambda shape: _bind(eq, shape))


def _broadcast(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    x = ins[0]
    if x.is_computed or x.lengths:
        return None
    kept = eq.params["broadcast_dimensions"]
    new = [
        d
        for d in range(len(eq.params["shape"]))
        if d not in kept or _size(x, kept.index(d)) != eq.params["shape"][d]
    ]
    return _made(known, eq, new, lambda shape: _bind(eq, shape, x.array))


def _made(
    known: KnownLengths,
    eq: Equation,
    new: Sequence[int],
    run: Callable[[tuple[int, ...]], jax.Array],
) -> list[Padded] | None:
    """Return what an equation makes of nothing, along sequences as long as they are held."""
    shape = list(eq.outputs[0].aval.shape)
    lengths = {d: known.made[shape[d]] for d in new if shape[d] in known.made}
    if not lengths:
        return None
    held = tuple(lengths[d].held if d in lengths else n for d, n in enumerate(shape))
    dims = tuple((lengths[d],) if d in lengths else _plain(n) for d, n in enumerate(shape))
    return [Padded(run(held), dims)]


def _bind(eq: Equation, shape: tuple[int, ...], *args: jax.Array) -> jax.Array:
    with compat.context_of(eq.source, eq.name_stack):
        return eq.source.primitive.bind(*args, **{**eq.params, "shape": shape})


def _reshape(known: KnownLengths, eq: Equation, ins: Sequence[Padded]) -> list[Padded] | None:
    """Let a sequence begin that is made of other dims, such as the patches of an image."""
    (x,), shape = ins, eq.outputs[0].aval.shape
    merges = x.is_computed and 3 <= len(shape) < len(x.dims)
    if not merges or x.lengths or not is_float(x.array.dtype):
        return None
    (found,) = _as_is(eq, ins)
    return [_as_sequence(known, found, 1)]


def _as_is(eq: Equation, ins: Sequence[Padded]) -> list[Padded]:
    """Run an equation on arrays that have no padding along the dims that matter."""
    arrays = [x.unpadded().array for x in ins]
    is_computed = any(x.is_computed for x in ins)
    outs = compat.call_equation(eq.source, eq.name_stack, arrays)
    return [Padded.plain(y, is_computed=is_computed) for y in outs]


def _as_sequence(known: KnownLengths, x: Padded, d: int) -> Padded:
    """Return an array that is a sequence along a dim, if it is long enough."""
    size = _size(x, d)
    return x.as_dim(d, (known.of(size),)) if known.is_long(size) else x


def _with_dim(x: Padded, d: int, array: jax.Array, dim: tuple[int | Length, ...]) -> Padded:
    return Padded(array, (*x.dims[:d], dim, *x.dims[d + 1 :]), x.is_computed)


def _size(x: Padded, d: int) -> int:
    size = 1
    for factor in x.dims[d]:
        size *= size_of(factor)
    return size


def _plain(n: int) -> tuple[int, ...]:
    return (n,) if n != 1 else ()


MOVES: dict[str, Move] = {
    "slice": _slice,
    "split": _split,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
}
"""Equations that move elements along a sequence, or make one."""
