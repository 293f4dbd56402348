"""Launch geometry: how many blocks a program of a kernel takes, and which thread takes which part.

Every kernel runs a grid of (wires, tiles). A program takes a tile: T whole blocks of one wire. If
the last block of a wire is short, it is left to the XLA reference.

Mosaic: a program is a warpgroup, 4 warps of 32 lanes. A register of a lane holds V neighbouring
elements. L lanes lie side by side along a block, and 32 / L blocks lie below each other in a warp.
The 4 warps lie below each other.

    V   the largest power of two that divides a piece, up to 16 bytes of the float
    L   LANES; more where a thread would hold more than FEW_ELEMENTS, or where the wire has fewer
        than T blocks; fewer where a piece is shorter
    T   4 x 32 / L, doubled as long as a thread holds few elements

A thread keeps its part of the tile in registers, T x block / 128 elements, and all loops over it
are unrolled. The fewer lanes share a block, the more of its elements a thread has, and the rarer is
the work of a block: its maximum over lanes, its step and the step's reciprocal. Blocks with more
than MOST_ELEMENTS for a thread, and wires of fewer blocks than T, do not fit. The last tile begins
early enough to be full. The blocks that it shares with the tile before are computed twice, with the
same bits.

Triton: a program is 4 warps. T x block is about TRITON_ELEMENTS, and T a power of two up to the
number of blocks in a wire. A piece is rounded up to a power of two, and masks exclude the padding.
The last tile begins early enough to be full. Every block of up to TRITON_LARGEST elements fits,
with two exceptions: groups that are rotated lie within a piece, and DeepSpeed's order of 4-bit
codes does not meet stochastic rounding.
"""

from __future__ import annotations

import dataclasses

from .layout import Layout
from .program import Cut, common_cut
from .rotation import SIZE

MOST_ELEMENTS = 64  # of a thread; with 128 it spills registers
FEW_ELEMENTS = 32  # of a thread, up to which T is doubled
LANES = 4
THREADS = 128
VECTOR_BYTES = 16

MOST_ITEMS = 2**31 - 1  # kernels count in int32

TRITON_ELEMENTS = 4096
TRITON_LARGEST = 32768
NEIGHBOURS = 4  # of a group, in one array of a rotated tile: 16 bytes of float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicTile:
    """The tile of a Mosaic program.

    Attributes:
      cut: how a block is cut into pieces.
      rows: T, the number of blocks.
      lanes: L, the number of lanes side by side along a piece.
      vector: V, the number of neighbouring elements in one register of a lane.
    """

    cut: Cut
    rows: int
    lanes: int
    vector: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TritonTile:
    """The tile of a Triton program.

    Attributes:
      cut: how a block is cut into pieces.
      rows: T, the number of blocks.
      chunks: number of parts into which a piece is cut: 1, or SIZE / NEIGHBOURS if blocks are
        rotated. Part i has the elements i x NEIGHBOURS and after of each group of SIZE.
      columns: number of elements of such a part, rounded up to a power of two.
    """

    cut: Cut
    rows: int
    chunks: int
    columns: int

    @classmethod
    def of(cls, cut: Cut, rows: int, *, rotated: bool) -> TritonTile:
        """Return a tile of `rows` blocks that are cut like this."""
        if rotated:
            columns = NEIGHBOURS * _power_of_two_from(cut.columns // SIZE)
            return cls(cut=cut, rows=rows, chunks=SIZE // NEIGHBOURS, columns=columns)
        return cls(cut=cut, rows=rows, chunks=1, columns=_power_of_two_from(cut.columns))

    @property
    def neighbours(self) -> int:
        """Number of elements that lie together in a part of a group."""
        return NEIGHBOURS

    @property
    def pieces(self) -> int:
        """Number of arrays that hold the tile."""
        return self.cut.count * self.chunks

    @property
    def padded(self) -> bool:
        """Whether some columns are no elements."""
        return self.columns * self.pieces != self.cut.block

    def in_bytes(self, pieces: int, width: int) -> TritonTile:
        """Return the same tile in bytes.

        Args:
          pieces: number of elements that share a byte.
          width: number of bytes of a block's codes.
        """
        count = self.cut.count // pieces
        cut = Cut(block=width, count=count, interleaved=self.cut.interleaved and count > 1)
        return TritonTile.of(cut, self.rows, rotated=self.chunks > 1)


def mosaic_tile(*layouts: Layout, items: int, item_bytes: int, num_wires: int) -> MosaicTile | None:
    """Return the tile of a Mosaic kernel; None if the kernel does not fit.

    Args:
      layouts: the layouts of the wires on either side, which have the same size.
      items: number of items in the kernel's largest array.
      item_bytes: bytes of a float that the kernel reads or writes; 1 if it only handles wires.
      num_wires: W, the number of wires.
    """
    layout, cut = layouts[0], common_cut(*layouts)
    if cut is None or cut.interleaved or items > MOST_ITEMS:
        return None
    if cut.block % cut.count or cut.columns == 1:
        return None
    vector = _power_of_two_in(cut.columns, VECTOR_BYTES // item_bytes)
    if num_wires > 1 and item_bytes > 1:  # the floats of every wire must begin at a whole vector
        vector = _power_of_two_in(layout.size, vector)
    if layout.rotated and cut.columns % SIZE:
        return None
    while vector:
        most = _power_of_two_in(cut.columns // vector, 32)
        lanes = min(LANES, most)
        while lanes < most and (cut.block > FEW_ELEMENTS * lanes or layout.full * lanes < THREADS):
            lanes *= 2
        rows, elements = THREADS // lanes, cut.block // lanes
        if elements <= MOST_ELEMENTS and rows <= layout.full:
            while 2 * elements <= FEW_ELEMENTS and 2 * rows <= layout.full:
                rows, elements = 2 * rows, 2 * elements
            return MosaicTile(cut=cut, rows=rows, lanes=lanes, vector=vector)
        vector //= 2
    return None


def triton_tile(*layouts: Layout, items: int, item_bytes: int, num_wires: int) -> TritonTile | None:
    """Return the tile of a Triton kernel; None if the kernel does not fit.

    Args:
      layouts: the layouts of the wires on either side, which have the same size.
      items: number of items in the kernel's largest array.
      item_bytes, num_wires: as for `mosaic_tile`; they have no effect.
    """
    del item_bytes, num_wires
    cut = common_cut(*layouts)
    if cut is None or items > MOST_ITEMS or cut.block > TRITON_LARGEST or not layouts[0].full:
        return None
    rotated = layouts[0].rotated
    if rotated and cut.columns % SIZE:
        return None
    if cut.interleaved and any(layout.rule.stochastic for layout in layouts):
        return None
    tile = TritonTile.of(cut, 1, rotated=rotated)
    most = max(1, TRITON_ELEMENTS * (cut.count if rotated else 1) // (tile.columns * tile.pieces))
    return dataclasses.replace(tile, rows=_power_of_two_up_to(min(most, layouts[0].full)))


def _power_of_two_from(n: int) -> int:
    """Return the smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def _power_of_two_up_to(n: int) -> int:
    """Return the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _power_of_two_in(n: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides n."""
    return min(n & -n, _power_of_two_up_to(most))
