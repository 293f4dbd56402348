"""The work of every kernel on one tile. It is the same for each backend, which adds loads and
stores.

A tile is T blocks of one wire, cut into pieces: one piece with 8 bits, two with 4. It is read from
floats or from N wires, and written to a wire or to floats:

    quantize        floats  -> wire
    dequantize      1 wire  -> floats
    dequant_reduce  N wires -> wire, or the float32 sum if the formats' blocks differ
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
from jax import lax

from .arithmetic import Machine, decode, encode
from .chance import two_chances
from .layout import Layout, pack, unpack
from .scales import Block, grid_of

# A sum of up to this many pieces is unrolled, such as 16 sources with 4 bits. A longer one loops.
UNROLLED = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a block is cut into pieces.

    Attributes:
      block: number of elements in the block.
      count: number of pieces, of ceil(block / count) elements each; the last one may have fewer.
      interleaved: whether a piece has every count-th element, instead of a run of elements.
    """

    block: int
    count: int
    interleaved: bool

    @property
    def columns(self) -> int:
        """C, the number of elements in a piece."""
        return -(-self.block // self.count)

    def spans(self) -> list[tuple[int, int]]:
        """Return (first element, stride) of each piece."""
        if self.interleaved:
            return [(i, self.count) for i in range(self.count)]
        return [(i * self.columns, 1) for i in range(self.count)]


def common_cut(*layouts: Layout) -> Cut | None:
    """Return the coarsest cut that suits wires of all these layouts; None if there is none.

    8-bit wires take every cut. Two codes that share a byte, or a position of random numbers, must
    lie in two pieces.
    """
    if len({(layout.size, layout.block, layout.rotated) for layout in layouts}) > 1:
        return None
    if len({layout.interleaved for layout in layouts if layout.rule.bits == 4}) > 1:
        return None
    return Cut(
        block=layouts[0].block,
        count=max(map(_pieces, layouts)),
        interleaved=any(layout.interleaved for layout in layouts),
    )


def _pieces(layout: Layout) -> int:
    return 2 if layout.rule.stochastic else layout.pieces


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
        """Return items [T, C]. From item `at` on there are T runs of `width` items each. Of each
        run it takes every step-th item, from `column` on."""
        ...

    def store(self, ref: Any, at: Any, width: int, column: int, step: int, x: jax.Array) -> None:
        """Write [T, C] to the items that `load` would read."""
        ...

    def load_row(self, ref: Any, at: Any, layout: Layout) -> jax.Array:
        """Return the T steps or offsets from byte `at` on, float32[T]."""
        ...

    def store_row(self, ref: Any, at: Any, row: jax.Array, layout: Layout) -> None:
        """Write T steps or offsets, float32[T], from byte `at` on."""
        ...

    def places(self, column: int, step: int) -> jax.Array:
        """Return the place of each element that `load` returns, counted from `at`, int32[T, C]. The
        width of a run is the block."""
        ...

    def valid(self, column: int, step: int) -> jax.Array | None:
        """Return whether each item is an element and not padding, bool[T, C]; None if all are."""
        ...


def read_floats(tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout) -> list[jax.Array]:
    """Read a tile of x[W, size]; return its pieces. If the layout is rotated, they are rotated, and
    float32."""
    at = wire * layout.size + first * layout.block
    pieces = [tile.load(ref, at, layout.block, *span) for span in tile.cut.spans()]
    if layout.rotated:
        return [tile.machine.rotate(tile.machine.floats(piece)) for piece in pieces]
    return pieces


def write_floats(
    tile: Tile, ref: Any, wire: Any, first: Any, pieces: list[jax.Array], layout: Layout
) -> None:
    """Write the pieces of a tile to x[W, size]."""
    at = wire * layout.size + first * layout.block
    for (column, step), piece in zip(tile.cut.spans(), pieces):
        tile.store(ref, at, layout.block, column, step, piece.astype(ref.dtype))


def read_wires(
    tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout, num_sources: int, num_wires: int
) -> list[jax.Array]:
    """Read a tile of N wires from uint8[N, W, num_bytes]; return the pieces of their sum, which is
    added up from source 0 on. If the layout is rotated, each source is rotated back first."""

    def values(source: Any) -> list[jax.Array]:
        pieces = _read_wire(tile, ref, source * num_wires + wire, first, layout)
        if layout.rotated:
            pieces = [tile.machine.rotate_back(piece) for piece in pieces]
        return pieces

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
      tile: the tile in memory.
      ref: the flat reference of all wires.
      wire: the number of the wire to write.
      first: the tile's first block in the wire.
      pieces: [T, C] each.
      layout: the layout of a wire.
      seed: two int32 scalars; None without stochastic rounding.
      source: the wire's number before any swizzle, from which the random numbers follow.
    """
    rule, machine, spans = layout.rule, tile.machine, tile.cut.spans()
    masks = [tile.valid(*span) for span in spans]
    valid = [mask for mask in masks if mask is not None] or None
    loaded = pieces if machine.compares_pairs else None
    pieces = [machine.floats(piece) for piece in pieces]
    block = Block(length=layout.block, machine=machine, valid=valid, loaded=loaded)
    grid = grid_of(pieces, rule, block)
    chance: list[jax.Array | None] = [None] * len(pieces)
    if seed is not None:
        origin = source * layout.size + first * layout.block
        half = len(pieces) // 2
        for i, span in enumerate(spans[:half]):
            chance[i], chance[i + half] = two_chances(seed, origin + tile.places(*span))
    codes = [encode(x, grid, rule, machine, u) for x, u in zip(pieces, chance)]

    width = layout.block_bytes(layout.block)
    base = wire * layout.num_bytes
    spans = _byte_spans(tile.cut, layout)
    for i, (column, step) in enumerate(spans):
        data = pack(codes[i :: len(spans)], grid.finite, layout)
        tile.store(ref, base + first * width, width, column, step, data)
    rows = [row for row in (grid.step, grid.offset) if row is not None]
    for i, row in enumerate(rows):
        tile.store_row(ref, base + layout.row_at(i) + first * layout.row_bytes, row, layout)


def _read_wire(tile: Tile, ref: Any, wire: Any, first: Any, layout: Layout) -> list[jax.Array]:
    """Return the pieces of a tile of one wire, float32[T, C] each."""
    base = wire * layout.num_bytes
    rows = [
        tile.load_row(ref, base + layout.row_at(i) + first * layout.row_bytes, layout)
        for i in range(layout.rows)
    ]
    step, offset = [*rows, None][:2]
    width = layout.block_bytes(layout.block)
    runs = tile.cut.count // layout.pieces
    codes = [
        unpack(tile.load(ref, base + first * width, width, column, step), layout, tile.machine)
        for column, step in _byte_spans(tile.cut, layout)
    ]
    # Run i holds piece i and, with 4 bits, piece runs + i.
    pieces = [codes[i % runs][i // runs] for i in range(tile.cut.count)]
    return [decode(code, step, offset, layout.rule) for code in pieces]


def _byte_spans(cut: Cut, layout: Layout) -> list[tuple[int, int]]:
    """Return (first byte, stride) in a block's payload for each piece, or pair of pieces that share
    bytes."""
    runs = cut.count // layout.pieces
    if runs == 1:
        return [(0, 1)]
    return cut.spans()[:runs]
