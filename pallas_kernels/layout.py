"""The layout of a wire: where its bytes lie.

    payload   the codes, block after block; the last block ends with the data
    zeros     up to a multiple of ROW_ALIGNMENT, so that a kernel may read a step as one word
    steps     of every block
    offsets   of every block, if the rule has offsets
    zeros     up to a multiple of ALIGNMENT, so that the next wire begins aligned

A step or an offset takes the 4 bytes of a float32, or the upper 2 of them (a bfloat16), the least
significant one first.

With 4 bits, an element of a block's first half shares a byte with the element at the same place of
the second half, which takes the high nibble. A kernel reads and writes such halves in whole runs.
In DeepSpeed's order two neighbours share a byte, and the first takes the high nibble. Rotated
blocks (rotation.py) are a multiple of 32 long; a shorter tail is filled up with zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import Machine, Rule, across
from .rotation import SIZE

ALIGNMENT = 16
ROW_ALIGNMENT = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of one wire.

    Attributes:
      size: number of elements.
      block: number of elements that share a step.
      rule: the rule by which blocks get their codes.
      rotated: whether the elements are rotated, 32 at a time.
    """

    size: int
    block: int
    rule: Rule
    rotated: bool

    @property
    def pieces(self) -> int:
        """Number of elements that share a byte."""
        return 8 // self.rule.bits

    @property
    def interleaved(self) -> bool:
        """Whether each of the two pieces is every other element (DeepSpeed's order), and not a half
        of the block."""
        return self.rule.bits == 4 and self.rule.scale == "deepspeed"

    @property
    def full(self) -> int:
        """Number of blocks of full length."""
        return self.size // self.block

    @property
    def tail(self) -> int:
        """Number of elements in the short last block; 0 if there is none."""
        return self.size % self.block

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the short one included."""
        return self.full + (self.tail > 0)

    def as_rotated_data(self) -> Layout:
        """Return the layout of the same wire, seen as a wire of the rotated elements themselves."""
        size = self.full * self.block + self.padded(self.tail)
        return dataclasses.replace(self, size=size, rotated=False)

    def padded(self, length: int) -> int:
        """Return the number of codes in a block of `length` elements. A rotated block is padded."""
        return -(-length // SIZE) * SIZE if self.rotated else length

    def block_bytes(self, length: int) -> int:
        """Return the bytes that the codes of a block of `length` elements take."""
        return -(-self.padded(length) // self.pieces)

    @property
    def payload_bytes(self) -> int:
        """Number of bytes of all codes."""
        return self.full * self.block_bytes(self.block) + self.block_bytes(self.tail)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one step, or of one offset."""
        return 2 if self.rule.short else 4

    @property
    def rows(self) -> int:
        """How many numbers a block has beside its codes: 1 for a step, 2 with an offset."""
        return 1 if self.rule.symmetric else 2

    def row_at(self, row: int) -> int:
        """Return where in the wire the steps (row 0) or the offsets (row 1) begin."""
        start = -(-self.payload_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return start + row * self.num_blocks * self.row_bytes

    @property
    def used_bytes(self) -> int:
        """Number of bytes of the wire without the zeros at its end."""
        return self.row_at(self.rows)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the wire."""
        return -(-self.used_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def zeros(self) -> list[tuple[int, int]]:
        """Where in the wire the zeros behind the payload and at the end begin, and how many."""
        payload, used = self.payload_bytes, self.used_bytes
        return [(payload, self.row_at(0) - payload), (used, self.num_bytes - used)]


def pack(codes: Sequence[jax.Array], finite: jax.Array, layout: Layout) -> jax.Array:
    """Pack codes into bytes, uint8[T, C].

    Args:
      codes: the codes of each piece, in the lowest 8 bits of int32[T, C]. With 8 bits there is
        one piece. With 4 bits there are the first and the second half of a block, or its
        even and odd elements if interleaved.
      finite: whether each block is finite, bool[T]. The codes of others become 0.
      layout: the layout of the wires.
    """
    if layout.rule.bits == 8:
        (byte,) = codes
    else:
        low, high = reversed(codes) if layout.interleaved else codes
        byte = (low & 15) | lax.shift_left(high, jnp.int32(4))
    mask = jnp.where(finite, 255, 0).astype(jnp.uint8)
    return byte.astype(jnp.uint8) & across(mask, byte)


def unpack(data: jax.Array, layout: Layout, machine: Machine) -> list[jax.Array]:
    """Undo `pack`: return the codes of each piece, whole numbers in float32[T, C]."""
    low, *high = machine.codes(data, layout.rule.bits)
    return [*high, low] if layout.interleaved else [low, *high]


def row_to_bytes(row: jax.Array, layout: Layout) -> list[jax.Array]:
    """Cut steps or offsets, float32[T], into bytes, uint8[T] each, the least significant first."""
    bits = lax.bitcast_convert_type(row, jnp.int32)
    first = 4 - layout.row_bytes
    return [
        (lax.shift_right_logical(bits, jnp.int32(8 * i)) & 255).astype(jnp.uint8)
        for i in range(first, 4)
    ]


def row_from_bytes(data: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Undo `row_to_bytes`: return steps or offsets, float32[T]."""
    first = 4 - layout.row_bytes
    parts = [
        lax.shift_left(byte.astype(jnp.int32), jnp.int32(8 * i))
        for i, byte in enumerate(data, first)
    ]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), jnp.float32)
