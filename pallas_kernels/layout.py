"""Where the bytes of a wire lie.

    payload   the codes, block after block; the last block is as short as the data
    steps     the least significant byte of every block's step, then the next byte of every step, ..
    offsets   likewise, if there are any
    zeros     up to a multiple of ALIGNMENT, so that wires lie well one after the other

A step takes the 4 bytes of a float32, or the upper 2 of them (a bfloat16). Bytes apart rather than
whole numbers: a kernel writes them next to a payload of any length without an unaligned word.

At 4 bits the element at some place of the first half of a block shares a byte with the one at the
same place of the second half, which has the high nibble; a kernel reads and writes such halves in
whole runs. In DeepSpeed's order two neighbours share a byte, and the first has the high nibble.
Rotated blocks (rotation.py) are a multiple of 32 long; a shorter tail is filled up with zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import Rule
from .rotation import SIZE

ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of one wire.

    Attributes:
      size: elements.
      block: elements that share a step.
      rule: of the codes.
      rotated: the elements are rotated, 32 at a time.
    """

    size: int
    block: int
    rule: Rule
    rotated: bool

    @property
    def pieces(self) -> int:
        """Elements that share a byte."""
        return 8 // self.rule.bits

    @property
    def interleaved(self) -> bool:
        """Whether the two pieces are every other element (DeepSpeed's order) and not halves."""
        return self.rule.bits == 4 and self.rule.scale == "deepspeed"

    @property
    def full(self) -> int:
        """Blocks of full length."""
        return self.size // self.block

    @property
    def tail(self) -> int:
        """Elements of the short last block; 0 if there is none."""
        return self.size % self.block

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return self.full + (self.tail > 0)

    def as_rotated_data(self) -> Layout:
        """Return the same wire, taken for one of the rotated elements."""
        size = self.full * self.block + self.padded(self.tail)
        return dataclasses.replace(self, size=size, rotated=False)

    def padded(self, length: int) -> int:
        """Return the codes of a block of `length`: more than its elements where it is rotated."""
        return -(-length // SIZE) * SIZE if self.rotated else length

    def block_bytes(self, length: int) -> int:
        """Return the bytes of the codes of a block of `length`."""
        return -(-self.padded(length) // self.pieces)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all codes."""
        return self.full * self.block_bytes(self.block) + self.block_bytes(self.tail)

    @property
    def row_bytes(self) -> int:
        """Bytes of one step, or of one offset."""
        return 2 if self.rule.short else 4

    @property
    def rows(self) -> int:
        """Numbers a block has beside its codes: a step, perhaps an offset."""
        return 1 if self.rule.symmetric else 2

    def row_at(self, row: int, byte: int) -> int:
        """Return where a byte of all steps (row 0) or offsets (row 1) begins."""
        return self.payload_bytes + (row * self.row_bytes + byte) * self.num_blocks

    @property
    def used_bytes(self) -> int:
        """Bytes of the wire without the zeros at its end."""
        return self.row_at(self.rows, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the wire."""
        return -(-self.used_bytes // ALIGNMENT) * ALIGNMENT


def pack(codes: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Return the bytes, uint8[T, C], of the codes of each piece, int32[T, C]: one piece at 8 bits,
    the first and the second half at 4 bits (or the even and the odd elements, if interleaved)."""
    if layout.rule.bits == 8:
        (code,) = codes
        return code.astype(jnp.uint8)
    low, high = reversed(codes) if layout.interleaved else codes
    return ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8)


def unpack(data: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the codes of each piece, int32[T, C], from what `pack` returns."""
    word = data.astype(jnp.int32)
    if layout.rule.bits == 8:
        return [(word ^ 128) - 128]
    low = ((word & 15) ^ 8) - 8
    high = (lax.shift_right_logical(word, jnp.int32(4)) ^ 8) - 8
    return [high, low] if layout.interleaved else [low, high]


def row_to_bytes(row: jax.Array, layout: Layout) -> list[jax.Array]:
    """Return the bytes, uint8[T] each, of steps or offsets, float32[T]; least significant first."""
    bits = lax.bitcast_convert_type(row, jnp.int32)
    first = 4 - layout.row_bytes
    return [
        (lax.shift_right_logical(bits, jnp.int32(8 * i)) & 255).astype(jnp.uint8)
        for i in range(first, 4)
    ]


def row_from_bytes(data: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Return float32[T] of what `row_to_bytes` returns."""
    first = 4 - layout.row_bytes
    parts = [
        lax.shift_left(byte.astype(jnp.int32), jnp.int32(8 * i))
        for i, byte in enumerate(data, first)
    ]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), jnp.float32)
