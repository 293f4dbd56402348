"""Launch geometry, all of it: how many blocks a program takes, and which thread takes what.

Every kernel runs a grid of (wires, tiles): a program takes T whole blocks of one wire. The short
last block of a wire, if there is one, is left to the XLA reference.

Mosaic: a program is a warpgroup, 4 warps of 32 lanes. A lane holds V neighbours, L lanes lie side
by side along a block and 32 / L blocks below each other, and the 4 warps below each other:

    V   the largest power of two that divides a piece, up to 16 bytes of the float
    L   as many lanes as fit in a piece
    T   4 x 32 / L, or a multiple, while a thread holds few elements of all pieces together

A thread keeps its part of the tile in registers, and everything is unrolled: T x block / 128
elements a thread. Blocks for which that passes MOST_ELEMENTS, and wires of fewer than T blocks, do
not fit. The last tile begins early enough to be full; what it shares with the one before is
computed twice, to the same bits.

Triton: a program is 4 warps. T x block is about TRITON_ELEMENTS, a piece is rounded up to a power
of two, and masks keep off what is too much. Every block fits, up to TRITON_LARGEST elements.
"""

from __future__ import annotations

import dataclasses

from .layout import Layout
from .program import Cut, common_cut

MOST_ELEMENTS = 64  # a thread; 128 spill registers
FEW_ELEMENTS = 32
THREADS = 128
VECTOR_BYTES = 16

MOST_ITEMS = 2**31 - 1  # kernels count in int32

TRITON_ELEMENTS = 4096
TRITON_LARGEST = 32768


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicTile:
    """The tile of a Mosaic program.

    Attributes:
      cut: of a block.
      rows: T.
      lanes: L.
      vector: V.
    """

    cut: Cut
    rows: int
    lanes: int
    vector: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TritonTile:
    """The tile of a Triton program.

    Attributes:
      cut: of a block.
      rows: T.
      columns: the elements of a piece, rounded up to a power of two.
    """

    cut: Cut
    rows: int
    columns: int


def mosaic_tile(*layouts: Layout, items: int, item_bytes: int, num_wires: int) -> MosaicTile | None:
    """Return the tile of a Mosaic kernel, or None where it does not fit.

    Args:
      layouts: of the wires on either side; of the same size.
      items: in its largest array.
      item_bytes: of a float that it reads or writes, 1 if there are none.
      num_wires: W.
    """
    layout, cut = layouts[0], common_cut(*layouts)
    if cut is None or cut.interleaved or items > MOST_ITEMS:
        return None
    if cut.block % cut.count or cut.columns == 1:
        return None
    vector = _power_of_two_in(cut.columns, VECTOR_BYTES // item_bytes)
    if num_wires > 1 and item_bytes > 1:  # the floats of every wire begin at a whole vector
        vector = _power_of_two_in(layout.size, vector)
    while vector:
        lanes = _power_of_two_in(cut.columns // vector, 32)
        rows = 4 * (32 // lanes)
        elements = rows * cut.block // THREADS
        if elements <= MOST_ELEMENTS and rows <= layout.full:
            while 2 * elements <= FEW_ELEMENTS and 2 * rows <= layout.full:
                rows, elements = 2 * rows, 2 * elements
            return MosaicTile(cut=cut, rows=rows, lanes=lanes, vector=vector)
        vector //= 2
    return None


def triton_tile(*layouts: Layout, items: int, item_bytes: int, num_wires: int) -> TritonTile | None:
    """Return the tile of a Triton kernel, or None where it does not fit.

    Args:
      layouts: of the wires on either side; of the same size.
      items: in its largest array.
      item_bytes, num_wires: as for Mosaic; any will do.
    """
    del item_bytes, num_wires
    cut = common_cut(*layouts)
    if cut is None or items > MOST_ITEMS or cut.block > TRITON_LARGEST or not layouts[0].full:
        return None
    columns = 1 << (cut.columns - 1).bit_length()
    rows = max(1, TRITON_ELEMENTS // (columns * cut.count))
    return TritonTile(cut=cut, rows=rows, columns=columns)


def _power_of_two_in(n: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides n."""
    return min(n & -n, 1 << (most.bit_length() - 1))
