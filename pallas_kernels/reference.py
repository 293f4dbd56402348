"""The kernels in plain XLA: the same bits on every backend, for every shape.

W   wires, one a row; each is laid out by the same Layout
N   sources of a reduction
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import Grid, Machine, decode, encode, round_to_even
from pallas_kernels.layout import Layout, pack, row_from_bytes, row_to_bytes, unpack
from pallas_kernels.random import uniform
from pallas_kernels.rotation import BACK, SIZE, THERE, rotate
from pallas_kernels.scales import Block, grid_of
from pallas_kernels.swizzle import Swizzle

Seed = tuple[jax.Array, jax.Array]


def quantize(
    x: jax.Array, layout: Layout, seed: Seed | None = None, swizzle: Swizzle | None = None
) -> jax.Array:
    """Return the wires of the rows of x.

    Args:
      x: [W, layout.size], float32, bfloat16 or float16.
      layout: of each wire.
      seed: two int32 scalars, for stochastic rounding.
      swizzle: where each wire goes; None: it stays.

    Returns:
      uint8[W, layout.num_bytes].
    """
    num_wires, split = x.shape[0], layout.full * layout.block
    payload, rows = [], []
    for start, length, count in (
        (0, layout.block, layout.full),
        (split, layout.tail, int(layout.tail > 0)),
    ):
        if not count:
            continue
        blocks = x[:, start : start + count * length].reshape(num_wires * count, length)
        data, grid = quantize_blocks(blocks, layout, seed, start, count)
        payload.append(data.reshape(num_wires, -1))
        rows.append(
            [row.reshape(num_wires, count) for row in (grid.step, grid.offset) if row is not None]
        )
    steps = [jnp.concatenate(parts, axis=1) for parts in zip(*rows)]
    planes = [byte for row in steps for byte in row_to_bytes(row, layout)]
    padding = jnp.zeros((num_wires, layout.num_bytes - layout.used_bytes), jnp.uint8)
    wires = jnp.concatenate([*payload, *planes, padding], axis=1)
    return wires if swizzle is None else wires[swizzle.sources()]


def dequantize(data: jax.Array, layout: Layout, dtype: jnp.dtype) -> jax.Array:
    """Return the values of wires.

    Args:
      data: uint8[W, layout.num_bytes].
      layout: of each wire.
      dtype: of the result; values are rounded to it once.

    Returns:
      dtype[W, layout.size].
    """
    num_wires = data.shape[0]
    split = layout.full * layout.block_bytes(layout.block)
    grid_rows = _rows(data, layout)
    out = []
    for byte, first, length, count in (
        (0, 0, layout.block, layout.full),
        (split, layout.full, layout.tail, int(layout.tail > 0)),
    ):
        if not count:
            continue
        width = layout.block_bytes(length)
        blocks = data[:, byte : byte + count * width].reshape(num_wires * count, width)
        rows = [row[:, first : first + count].reshape(-1) for row in grid_rows]
        values = dequantize_blocks(blocks, rows, layout, length)
        out.append(values.reshape(num_wires, count * length))
    return jnp.concatenate(out, axis=1).astype(dtype)


def dequant_reduce(
    data: jax.Array, layout: Layout, out: Layout, seed: Seed | None = None
) -> jax.Array:
    """Return the wires of the sums of N wires each.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: of the sources.
      out: of the result.
      seed: for stochastic rounding.

    Returns:
      uint8[W, out.num_bytes]: summed in float32, source 0 first.
    """

    def add(total: jax.Array, source: jax.Array) -> tuple[jax.Array, None]:
        return total + dequantize(source, layout, jnp.dtype(jnp.float32)), None

    total = dequantize(data[0], layout, jnp.dtype(jnp.float32))
    total, _ = lax.scan(add, total, data[1:])
    return quantize(total, out, seed)


def quantize_blocks(
    x: jax.Array, layout: Layout, seed: Seed | None, start: int, count: int
) -> tuple[jax.Array, Grid]:
    """Return (payload uint8[T, B], grid) of blocks of one length.

    Args:
      x: [T, length]; T is wires x count.
      layout: of the wires.
      seed: for stochastic rounding.
      start: the first element's place in its wire.
      count: of blocks of a wire.
    """
    length = x.shape[1]
    x = x.astype(jnp.float32)
    machine = Machine(
        nearest=round_to_even,
        largest=lambda keys: _reduced(keys, jnp.max, jnp.maximum),
        total=lambda terms: _reduced(terms, jnp.sum, jnp.add),
        keep=lax.optimization_barrier,
    )
    if layout.rotated:
        x = _rotated(jnp.pad(x, ((0, 0), (0, layout.padded(length) - length))), THERE)
    # The whole block at once: a grid does not depend on how it is cut.
    grid = grid_of([x], layout.rule, Block(length=x.shape[1], machine=machine))
    chance = [None] * layout.pieces
    if seed is not None:
        wire, block_index = jnp.divmod(jnp.arange(x.shape[0], dtype=jnp.int32), count)
        first = wire * layout.size + start + block_index * length
        position = first[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
        chance = [uniform(seed, piece) for piece in _cut(position, layout)]
    codes = [
        encode(piece, grid, layout.rule, machine, u) for piece, u in zip(_cut(x, layout), chance)
    ]
    return pack(codes, layout), grid


def dequantize_blocks(
    data: jax.Array, rows: list[jax.Array], layout: Layout, length: int
) -> jax.Array:
    """Return float32[T, length], the values of blocks of one length.

    Args:
      data: uint8[T, B].
      rows: steps and, if there are any, offsets: float32[T].
      layout: of the wires.
      length: of the blocks.
    """
    step, offset = [*rows, None][:2]
    pieces = [decode(code, step, offset) for code in unpack(data, layout)]
    if layout.interleaved:
        x = jnp.stack(pieces, axis=-1).reshape(data.shape[0], -1)
    else:
        x = jnp.concatenate(pieces, axis=1)
    if layout.rotated:
        x = _rotated(x, BACK)
    return x[:, :length]


def _rows(data: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the steps and offsets of wires: float32[W, num_blocks] each."""

    def plane(row: int, byte: int) -> jax.Array:
        start = layout.row_at(row, byte)
        return data[:, start : start + layout.num_blocks]

    return [
        row_from_bytes([plane(row, byte) for byte in range(layout.row_bytes)], layout)
        for row in range(layout.rows)
    ]


def _cut(x: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the pieces of blocks [T, length] that share bytes, padded with zeros: [T, C] each."""
    num_blocks, length = x.shape
    width = -(-length // layout.pieces)
    x = jnp.pad(x, ((0, 0), (0, width * layout.pieces - length)))
    if layout.interleaved:
        x = x.reshape(num_blocks, width, layout.pieces)
        return [x[..., i] for i in range(layout.pieces)]
    return [x[:, i * width : (i + 1) * width] for i in range(layout.pieces)]


def _rotated(x: jax.Array, factor: float) -> jax.Array:
    """Return blocks [T, length], each of SIZE equal runs, rotated across the runs."""
    runs = x.reshape(x.shape[0], SIZE, -1)
    runs = rotate([runs[:, i] for i in range(SIZE)], factor)
    return lax.optimization_barrier(jnp.stack(runs, axis=1)).reshape(x.shape)


def _reduced(
    x: jax.Array,
    along: Callable[..., jax.Array],
    pair: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return the reduction of each row of integers: [T, C] -> [T].

    XLA's CPU compiler has vector instructions for a reduction over a dim that is not the last one:
    first of every 16th element, then of the 16 (10 times as fast).
    """
    lanes = 16
    while x.shape[1] % lanes:
        lanes //= 2
    x = along(x.reshape(x.shape[0], -1, lanes), axis=1)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = pair(x[:, :half], x[:, half:])
    return x[:, 0]
