"""The three functions of the kernels in plain XLA: the same bits on every backend, for every shape.

W   number of wires, one in each row, all with the same Layout
N   number of sources of a reduction
T   number of blocks of one length, over all wires
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import Grid, Machine, as_float32, codes_of_bytes, decode, encode, round_to_even
from .chance import two_chances
from .floats import bits_of, float_of
from .layout import Layout, pack, row_from_bytes, row_to_bytes, unpack
from .rotation import rotate, rotate_back
from .scales import Block, grid_of
from .swizzle import Swizzle

Seed = tuple[jax.Array, jax.Array]

_UNROLLED = 16
"""Sums of up to so many sources are one kernel; XLA's CPU compiler runs a loop on one core."""


def quantize(
    x: jax.Array, layout: Layout, seed: Seed | None = None, swizzle: Swizzle | None = None
) -> jax.Array:
    """Quantize each row of x into a wire.

    Args:
      x: [W, layout.size], float32, bfloat16 or float16.
      layout: the layout of each wire.
      seed: two int32 scalars, for stochastic rounding.
      swizzle: the place of each wire in the result; None keeps their order.

    Returns:
      uint8[W, layout.num_bytes].
    """
    num_wires, split = x.shape[0], layout.full * layout.block
    parts = []
    if layout.full:
        parts.append(_encoded(x[:, :split], layout, seed, start=0, count=layout.full))
    if layout.tail:
        parts.append(_encoded(x[:, split:], layout, seed, start=split, count=1))
    payloads, rows = zip(*parts)
    gap, end = (jnp.zeros((num_wires, count), jnp.uint8) for _, count in layout.zeros)
    rows = [part for row in zip(*rows) for part in row]
    wires = jnp.concatenate([*payloads, gap, *rows, end], axis=1)
    return wires if swizzle is None else wires[swizzle.sources()]


def dequant_sum(data: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Sum N wires each in float32, from source 0 on, and round the sums to dtype.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of each wire.
      dtype: the dtype of the result.

    Returns:
      dtype[W, layout.size].
    """
    parts = []
    if layout.full:
        parts.append(_summed(data, layout, dtype, first=0, length=layout.block, count=layout.full))
    if layout.tail:
        parts.append(_summed(data, layout, dtype, first=layout.full, length=layout.tail, count=1))
    return jnp.concatenate(parts, axis=1)


def dequant_reduce(
    data: jax.Array, layout: Layout, out: Layout, seed: Seed | None = None
) -> jax.Array:
    """Sum N wires each in float32, and quantize the sums.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of the sources.
      out: the layout of the result, with the same size.
      seed: two int32 scalars, for stochastic rounding.

    Returns:
      uint8[W, out.num_bytes].
    """
    return quantize(dequant_sum(data, layout, jnp.float32), out, seed)


def quantize_rest(
    x: jax.Array, layout: Layout, seed: Seed | None = None, swizzle: Swizzle | None = None
) -> list[tuple[int, jax.Array]]:
    """Compute the part of `quantize` that kernels leave out: the short last block x[W, tail], and
    the zeros at the end of a wire.

    Returns:
      A list of (where in the wire, bytes uint8[W, n]).
    """
    patches = []
    if layout.tail:
        split = layout.full * layout.block
        payload, rows = _encoded(x, layout, seed, start=split, count=1)
        patches.append((layout.full * layout.block_bytes(layout.block), payload))
        for i, row in enumerate(rows):
            patches.append((layout.row_at(i) + layout.full * layout.row_bytes, row))
    if swizzle is not None:
        patches = [(at, part[swizzle.sources()]) for at, part in patches]
    for at, count in layout.zeros:
        if count:
            patches.append((at, jnp.zeros((x.shape[0], count), jnp.uint8)))
    return patches


def dequant_sum_rest(data: jax.Array, layout: Layout, dtype: Any) -> jax.Array:
    """Compute the part of `dequant_sum` that kernels leave out: the short last block, dtype[W,
    tail]."""
    if not layout.tail:
        return jnp.zeros((data.shape[1], 0), dtype)
    return _summed(data, layout, dtype, first=layout.full, length=layout.tail, count=1)


def _encoded(
    x: jax.Array, layout: Layout, seed: Seed | None, *, start: int, count: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Quantize `count` blocks of one length in each wire, whose first element is at `start`.

    Returns:
      The payload, and the bytes of the steps and of the offsets, uint8[W, ...] each.
    """
    num_wires = x.shape[0]
    blocks = x.reshape(num_wires * count, -1)
    data, grid = quantize_blocks(blocks, layout, seed, start, count)
    rows = [row for row in (grid.step, grid.offset) if row is not None]
    rows = [jnp.stack(row_to_bytes(row, layout), axis=1) for row in rows]
    return data.reshape(num_wires, -1), [row.reshape(num_wires, -1) for row in rows]


def _summed(
    data: jax.Array, layout: Layout, dtype: Any, *, first: int, length: int, count: int
) -> jax.Array:
    """Return the sums over N of `count` blocks from `first` on, dtype[W, count x length]."""
    num_sources, num_wires, num_bytes = data.shape
    width = layout.block_bytes(length)
    at = first * layout.block_bytes(layout.block)
    blocks = data[:, :, at : at + count * width].reshape(num_sources, num_wires * count, width)
    rows = [
        row[:, first : first + count].reshape(num_sources, -1)
        for row in _rows(data.reshape(-1, num_bytes), layout)
    ]
    # Otherwise XLA's CPU compiler makes a step from its bytes once for every element.
    rows = lax.optimization_barrier(rows)

    def values(source: tuple[jax.Array, list[jax.Array]]) -> list[jax.Array]:
        return dequantized_pieces(*source, layout)

    def add(total: list[jax.Array], source: Any) -> list[jax.Array]:
        return [x + y for x, y in zip(total, values(source), strict=True)]

    total = values((blocks[0], [row[0] for row in rows]))
    if num_sources <= _UNROLLED:
        for i in range(1, num_sources):
            total = add(total, (blocks[i], [row[i] for row in rows]))
    else:
        rest = (blocks[1:], [row[1:] for row in rows])
        total, _ = lax.scan(lambda total, source: (add(total, source), None), total, rest)
    total = [x.astype(dtype) for x in total]
    return _joined(total, layout)[:, :length].reshape(num_wires, -1)


def quantize_blocks(
    x: jax.Array, layout: Layout, seed: Seed | None, start: int, count: int
) -> tuple[jax.Array, Grid]:
    """Quantize blocks of one length; return their payload, uint8[T, bytes], and their grid.

    Args:
      x: [T, length]; T is wires x count.
      layout: the layout of the wires.
      seed: two int32 scalars, for stochastic rounding.
      start: the place of the first block's first element in its wire.
      count: number of blocks in each wire.
    """
    length = x.shape[1]
    x = x.astype(jnp.float32)
    if layout.rotated:
        x = jnp.pad(x, ((0, 0), (0, layout.padded(length) - length)))
        x = rotate(x)
    # The block is one piece here, because a grid does not depend on how a block is cut.
    grid = grid_of([x], layout.rule, Block(length=x.shape[1], machine=MACHINE))
    chance: list[jax.Array | None] = [None] * layout.pieces
    if seed is not None:
        wire, block_index = jnp.divmod(jnp.arange(x.shape[0], dtype=jnp.int32), count)
        first = wire * layout.size + start + block_index * length
        position = first[:, None] + jnp.arange(-(-x.shape[1] // 2), dtype=jnp.int32)
        # An element of the first half and one of the second share a position.
        halves = jnp.concatenate(two_chances(seed, position), axis=1)
        chance = list(_cut(halves[:, : x.shape[1]], layout))
    codes = [
        encode(piece, grid, layout.rule, MACHINE, u) for piece, u in zip(_cut(x, layout), chance)
    ]
    return pack(codes, grid.finite, layout), grid


def dequantized_pieces(data: jax.Array, rows: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Return the values of blocks of one length in the pieces that share bytes, float32[T, C] each;
    in one piece if they are rotated.

    Args:
      data: the payload of the blocks, uint8[T, bytes].
      rows: the steps, and the offsets if the rule has them, float32[T] each.
      layout: the layout of the wires.
    """
    step, offset = [*rows, None][:2]
    pieces = [decode(c, step, offset, layout.rule) for c in unpack(data, layout, MACHINE)]
    if not layout.rotated:
        return pieces
    return [rotate_back(_joined(pieces, layout))]


def _joined(pieces: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Undo `_cut`, but for its padding."""
    if len(pieces) == 1:
        return pieces[0]
    if layout.interleaved:
        return jnp.stack(pieces, axis=-1).reshape(pieces[0].shape[0], -1)
    return jnp.concatenate(pieces, axis=1)


def _rows(data: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the steps, and the offsets if there are any, of wires: float32[W, num_blocks] each."""

    def row(i: int) -> jax.Array:
        start, size = layout.row_at(i), layout.num_blocks * layout.row_bytes
        parts = data[:, start : start + size].reshape(-1, layout.num_blocks, layout.row_bytes)
        return row_from_bytes([parts[:, :, j] for j in range(layout.row_bytes)], layout)

    return [row(i) for i in range(layout.rows)]


def _cut(x: jax.Array, layout: Layout) -> list[jax.Array]:
    """Cut blocks [T, length] into the pieces that share bytes, [T, C] each, padded with zeros."""
    num_blocks, length = x.shape
    width = -(-length // layout.pieces)
    x = jnp.pad(x, ((0, 0), (0, width * layout.pieces - length)))
    if layout.interleaved:
        x = x.reshape(num_blocks, width, layout.pieces)
        return [x[..., i] for i in range(layout.pieces)]
    return [x[:, i * width : (i + 1) * width] for i in range(layout.pieces)]


def _largest(pieces: Sequence[jax.Array]) -> jax.Array:
    """Return the largest number of each row of the one piece."""
    (x,) = pieces
    if x.dtype == jnp.float32:  # integers are faster to compare, and NaN is above all of them
        return float_of(_reduced(bits_of(x), jnp.max, jnp.maximum))
    return _reduced(x, jnp.max, jnp.maximum)


def _total(terms: jax.Array) -> jax.Array:
    """Return the sum of each row. XLA's CPU compiler adds whole numbers three times as fast when
    they are integers."""
    return _reduced(terms.astype(jnp.int32), jnp.sum, jnp.add).astype(jnp.float32)


def _reduced(
    x: jax.Array,
    along: Callable[..., jax.Array],
    pair: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Reduce each row: [T, C] -> [T].

    XLA's CPU compiler uses vector instructions only for reductions over a dim that is not the last.
    So every 16th element is reduced first, then the 16 results, which is 10 times as fast.
    """
    lanes = 16
    while x.shape[1] % lanes:
        lanes //= 2
    x = along(x.reshape(x.shape[0], -1, lanes), axis=1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = pair(x[:, :half], x[:, half:])
    return x[:, 0]


MACHINE = Machine(
    floats=as_float32,
    rotate=rotate,
    rotate_back=rotate_back,
    nearest=round_to_even,
    integer=lambda x: round_to_even(x).astype(jnp.int32),
    codes=codes_of_bytes,
    compares_pairs=False,
    largest=_largest,
    smallest=lambda pieces: -_largest([-piece for piece in pieces]),
    total=_total,
    keep=lax.optimization_barrier,
)
