"""What every kernel does with one tile: the same for each backend, which brings loads and stores.

A tile is T blocks of one wire, cut into pieces: one at 8 bits, two at 4, SIZE where the blocks are
rotated. It comes from floats or from N wires, and goes to a wire or to floats:

    quantize        floats  -> wire
    dequantize      1 wire  -> floats
    dequant_reduce  N wires -> wire, or the float32 sum where the formats' blocks differ
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import Machine, decode, encode
from .chance import uniform
from .layout import Layout, pack, row_from_bytes, row_to_bytes, unpack
from .rotation import SIZE, rotate, rotate_back
from .scales import Block, grid_of

# Sums of up to so many pieces are written out, 16 sources of 4 bits for instance; longer ones loop.
UNROLLED = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a block lies in pieces.

    Attributes:
      block: elements of it.
      count: of pieces, of ceil(block / count) elements each; the last one may lack some.
      interleaved: a piece has every count-th element, instead of a run of them.
    """

    block: int
    count: int
    interleaved: bool

    @property
    def columns(self) -> int:
        """C, the elements of a piece."""
        return -(-self.block // self.count)

    def spans(self) -> list[tuple[int, int]]:
        """Return (first element, stride) of each piece."""
        if self.interleaved:
            return [(i, self.count) for i in range(self.count)]
        return [(i * self.columns, 1) for i in range(self.count)]


def common_cut(*layouts: Layout) -> Cut | None:
    """Return the coarsest cut that suits wires of all these layouts, or None if there is none.

    8-bit wires take every cut; two codes that share a byte are in two pieces, as are the elements
    that are rotated together in SIZE.
    """
    if len({(layout.size, layout.block, layout.rotated) for layout in layouts}) > 1:
        return None
    if len({layout.interleaved for layout in layouts if layout.rule.bits == 4}) > 1:
        return None
    return Cut(
        block=layouts[0].block,
        count=SIZE if layouts[0].rotated else max(layout.pieces for layout in layouts),
        interleaved=any(layout.interleaved for layout in layouts),
    )


class Tile(Protocol):
    """T blocks of one wire in the memory of one backend."""

    @property
    def cut(self) -> Cut:
        """How the blocks are cut."""
        ...

    @property
    def machine(self) -> Machine:
        """The backend's arithmetic."""
        ...

    def load(self, ref: Any, at: Any, width: int, column: int, step: int) -> jax.Array:
        """Return [T, C]: of T runs of `width` items from item `at` on, the items from `column` on,
        every step-th."""
        ...

    def store(self, ref: Any, at: Any, width: int, column: int, step: int, x: jax.Array) -> None:
        """Write [T, C] to where `load` would read it."""
        ...

    def load_row(self, ref: Any, at: Any) -> jax.Array:
        """Return [T] from item `at` on."""
        ...

    def store_row(self, ref: Any, at: Any, row: jax.Array) -> None:
        """Write [T] from item `at` on."""
        ...

    def columns(self) -> jax.Array:
        """Return int32[T, C]: the place of each element in its piece."""
        ...

    def places(self, column: int, step: int) -> jax.Array:
        """Return int32[T, C]: the place of each element that `load` returns, `width` being the
        block, counted from `at`."""
        ...

    def valid(self, column: int, step: int) -> jax.Array | None:
        """Return bool[T, C], whether each is an element and not padding; None if all are."""
        ...


def read_floats(tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout) -> list[jax.Array]:
    """Return the pieces of a tile of x[W, size], float32; rotated if the layout says so."""
    at = wire * layout.size + first * layout.block
    pieces = [
        tile.load(ref, at, layout.block, column, step).astype(jnp.float32)
        for column, step in tile.cut.spans()
    ]
    return rotate(pieces, tile.columns()) if layout.rotated else pieces


def write_floats(
    tile: Tile, ref: Any, wire: Any, first: Any, pieces: list[jax.Array], layout: Layout
) -> None:
    """Write the pieces of a tile to x[W, size], rotated back."""
    at = wire * layout.size + first * layout.block
    if layout.rotated:
        pieces = rotate_back(pieces, tile.columns())
    for (column, step), piece in zip(tile.cut.spans(), pieces):
        tile.store(ref, at, layout.block, column, step, piece.astype(ref.dtype))


def read_wires(
    tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout, num_sources: int, num_wires: int
) -> list[jax.Array]:
    """Return the pieces of the sums of a tile over uint8[N, W, num_bytes], source 0 first."""

    def values(source: Any) -> list[jax.Array]:
        return _read_wire(tile, ref, source * num_wires + wire, first, layout)

    def add(source: Any, total: list[jax.Array]) -> list[jax.Array]:
        return [a + b for a, b in zip(total, values(source))]

    total = values(0)
    if num_sources > 1 and num_sources * tile.cut.count > UNROLLED:
        return list(lax.fori_loop(1, num_sources, add, total))
    for source in range(1, num_sources):
        total = add(source, total)
    return total


def write_wire(
    tile: Tile,
    ref: Any,
    wire: Any,
    first: Any,
    pieces: list[jax.Array],
    layout: Layout,
    *,
    seed: tuple[Any, Any] | None,
    source: Any,
) -> None:
    """Quantize the pieces of a tile into uint8[W, num_bytes].

    Args:
      tile: where.
      ref: of the wires, flat.
      wire: which of them.
      first: block of it.
      pieces: float32[T, C].
      layout: of a wire.
      seed: for stochastic rounding.
      source: the wire's number before any swizzle, for the random numbers.
    """
    rule, spans = layout.rule, tile.cut.spans()
    masks = [tile.valid(*span) for span in spans]
    valid = [mask for mask in masks if mask is not None] or None
    block = Block(length=layout.block, machine=tile.machine, valid=valid)
    grid = grid_of(pieces, rule, block)
    chance: list[jax.Array | None] = [None] * len(pieces)
    if seed is not None:
        origin = source * layout.size + first * layout.block
        chance = [uniform(seed, origin + tile.places(*span)) for span in spans]
    codes = [encode(x, grid, rule, tile.machine, u) for x, u in zip(pieces, chance)]

    width = layout.block_bytes(layout.block)
    base = wire * layout.num_bytes
    spans = _byte_spans(tile.cut, layout)
    for i, (column, step) in enumerate(spans):
        data = pack(codes[i :: len(spans)], layout)
        tile.store(ref, base + first * width, width, column, step, data)
    rows = [row for row in (grid.step, grid.offset) if row is not None]
    for i, row in enumerate(rows):
        for j, byte in enumerate(row_to_bytes(row, layout)):
            tile.store_row(ref, base + layout.row_at(i, j) + first, byte)


def _read_wire(tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout) -> list[jax.Array]:
    base = wire * layout.num_bytes
    rows = [
        row_from_bytes(
            [
                tile.load_row(ref, base + layout.row_at(i, j) + first)
                for j in range(layout.row_bytes)
            ],
            layout,
        )
        for i in range(layout.rows)
    ]
    step, offset = [*rows, None][:2]
    width = layout.block_bytes(layout.block)
    runs = tile.cut.count // layout.pieces
    codes = [
        unpack(tile.load(ref, base + first * width, width, column, step), layout)
        for column, step in _byte_spans(tile.cut, layout)
    ]
    # Run i holds piece i and, at 4 bits, piece runs + i.
    pieces = [codes[i % runs][i // runs] for i in range(tile.cut.count)]
    return [decode(code, step, offset) for code in pieces]


def _byte_spans(cut: Cut, layout: Layout) -> list[tuple[int, int]]:
    """Return (first byte, stride) in a block's payload of what `pack` makes of each piece or pair
    of pieces."""
    runs = cut.count // layout.pieces
    if runs == 1:
        return [(0, 1)]
    return cut.spans()[:runs]
