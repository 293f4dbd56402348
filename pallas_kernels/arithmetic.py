"""Codes and their values: the same lines run in the XLA reference and in every kernel.

    T        number of blocks, one in each row
    C        number of elements in one piece of a block
    piece    float32[T, C]; the pieces of a block together make up the block
    row      one number for each block: [T]

`value = code x step + offset`, and a `Grid` holds the step and the offset of each block. Compilers
for different machines must give the same bits. So, besides the rules of floats.py,

* every sum over a block is a sum of whole numbers below 2^24, in whatever order;
* a product feeds a sum only if the product is exact. A compiler that fuses the two into one
  multiply-add then changes nothing. So steps have 16 significant bits (except DeepSpeed's): their
  products with codes are exact;
* no step is below 2^-98. Hardware that flushes subnormals to zero then gives the same codes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .floats import bits_of, float_of, truncated
from .rotation import rotate, rotate_back


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule by which a block gets its codes.

    Attributes:
      bits: bits of a code, 8 or 4. Codes lie in [-2^(bits-1), 2^(bits-1) - 1].
      symmetric: whether blocks have no offset.
      scale: the rule that chooses the step; see scales.py.
      stochastic: whether a value between two codes takes the upper one with the probability of its
        fraction, instead of the nearer one. Only with the scale "bound", which clips nothing.
      short: whether steps and offsets have the 8 significant bits of a bfloat16.
    """

    bits: int
    symmetric: bool
    scale: Literal["bound", "mse", "deepspeed"]
    stochastic: bool
    short: bool

    @property
    def half(self) -> int:
        """Number of negative codes."""
        return 1 << (self.bits - 1)

    @property
    def exact(self) -> bool:
        """Whether the product of a code and a step is exact."""
        return self.scale != "deepspeed"


class Machine(NamedTuple):
    """The operations that each backend writes in its own way.

    Attributes:
      floats: converts an array to float32.
      rotate: multiplies groups of neighbours in float32[T, C] by the Hadamard matrix.
      rotate_back: undoes `rotate`.
      nearest: rounds float32[T, C] to the nearest whole numbers, to even on ties, as float32. Their
        magnitude is at most 2^22.
      integer: rounds float32[T, C] likewise, to int32. The lowest 8 bits are those of the whole
        number; the others are undefined.
      codes: (uint8[T, C], bits) -> the codes in each byte, float32[T, C] each: one of 8 bits, or
        the lower and the upper one of 4.
      compares_pairs: whether `largest` compares two neighbours of 16 bits at a time.
      largest: returns the largest number in each row of all pieces, [T, C] each, in float32 or
        int32. With floats that is NaN if any is. If all are negative it is any of them.
      smallest: returns the smallest number in each row of pieces of floats, in float32. It is NaN
        if any is. If all are positive it is any of them.
      total: returns the sum of each row of float32[T, C], whole numbers whose sums are below 2^24.
      keep: returns a grid unchanged, and makes the compiler compute it once instead of once for
        every element.
    """

    floats: Callable[[jax.Array], jax.Array]
    rotate: Callable[[jax.Array], jax.Array]
    rotate_back: Callable[[jax.Array], jax.Array]
    nearest: Callable[[jax.Array], jax.Array]
    integer: Callable[[jax.Array], jax.Array]
    codes: Callable[[jax.Array, int], list[jax.Array]]
    compares_pairs: bool
    largest: Callable[[Sequence[jax.Array]], jax.Array]
    smallest: Callable[[Sequence[jax.Array]], jax.Array]
    total: Callable[[jax.Array], jax.Array]
    keep: Callable[[Grid], Grid]


class Grid(NamedTuple):
    """The values that the codes of each block stand for. Every field is a row.

    Attributes:
      step: float32, not zero. It may be negative with the scale "mse".
      inverse: float32, 1 / step, nearly.
      offset: float32; None if the rule is symmetric.
      finite: bool, whether the block is finite. If not, its step and offset are NaN.
    """

    step: jax.Array
    inverse: jax.Array
    offset: jax.Array | None
    finite: jax.Array


def as_float32(x: jax.Array) -> jax.Array:
    """Convert x to float32."""
    return x.astype(jnp.float32)


def round_to_even(x: jax.Array) -> jax.Array:
    """Round x to the nearest whole number, to even on ties; return float32."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


# A float32 from 2^23 on has no fraction: adding this rounds |x| <= 2^22 to a whole number, which
# the lowest bits of the sum hold.
_ROUNDER = np.float32(1.5 * 2**23)
_WHOLE = 0x4B000000  # the bits of 2^23, after which a unit of the last place is 1


def kernel_machine(*, interpret: bool) -> Machine:
    """Return the operations of a kernel. A GPU rounds and converts with additions, at 8 times the
    speed of its instructions for that. XLA, which runs interpreters, might leave out a number that
    is added and subtracted again."""
    total = functools.partial(jnp.sum, axis=1)
    if interpret:
        return Machine(
            floats=as_float32,
            rotate=rotate,
            rotate_back=rotate_back,
            nearest=round_to_even,
            integer=lambda x: round_to_even(x).astype(jnp.int32),
            codes=codes_of_bytes,
            compares_pairs=False,
            largest=_largest_bits,
            smallest=lambda pieces: -_largest_bits([-piece for piece in pieces]),
            total=total,
            keep=lambda grid: grid,
        )
    return Machine(
        floats=as_float32,
        rotate=rotate,
        rotate_back=rotate_back,
        nearest=lambda x: (x + _ROUNDER) - _ROUNDER,
        integer=lambda x: bits_of(x + _ROUNDER),
        codes=functools.partial(
            codes_of_bytes,
            whole=lambda word, less: float_of(word | _WHOLE) - np.float32(2**23 + less),
        ),
        compares_pairs=False,
        largest=largest,
        smallest=smallest,
        total=total,
        keep=lambda grid: grid,
    )


def largest(pieces: Sequence[jax.Array]) -> jax.Array:
    """Return the largest number in each row of all pieces."""
    return jnp.max(functools.reduce(jnp.maximum, pieces), axis=1)


def smallest(pieces: Sequence[jax.Array]) -> jax.Array:
    """Return the smallest number in each row of all pieces."""
    return jnp.min(functools.reduce(jnp.minimum, pieces), axis=1)


def _largest_bits(pieces: Sequence[jax.Array]) -> jax.Array:
    """Return `largest` by comparing the bits of floats: XLA's CPU compiler may lose a NaN."""
    if pieces[0].dtype == jnp.int32:
        return largest(pieces)
    return float_of(largest([bits_of(piece) for piece in pieces]))


def codes_of_bytes(
    data: jax.Array,
    bits: int,
    whole: Callable[[jax.Array, int], jax.Array] = lambda word, less: (word - less).astype(
        jnp.float32
    ),
) -> list[jax.Array]:
    """Return the codes that bytes hold, float32[T, C] each.

    Args:
      data: uint8[T, C].
      bits: of a code: 8, or 4 for two codes, the lower one first.
      whole: (int32[T, C] from 0 to 255, an int) -> their difference, float32[T, C].
    """
    word = data.astype(jnp.int32)
    if bits == 8:
        return [whole(word ^ 128, 128)]
    word = word ^ 0x88
    return [whole(word & 15, 8), whole(lax.shift_right_logical(word, jnp.int32(4)), 8)]


def across(row: jax.Array, piece: jax.Array) -> jax.Array:
    """Repeat each block's number along its elements: [T] -> [T, C]."""
    return lax.broadcast_in_dim(row, piece.shape, (0,))


def encode(
    piece: jax.Array,
    grid: Grid,
    rule: Rule,
    machine: Machine,
    chance: jax.Array | None = None,
) -> jax.Array:
    """Return the codes of a piece as int32[T, C].

    A code is in the lowest 8 bits; the others are undefined. So are the codes of a block that is
    not finite.

    Args:
      piece: float32[T, C].
      grid: the grid of its blocks.
      rule: the rule that made the grid.
      machine: the backend's operations.
      chance: random numbers, float32[T, C] in (-1/2, 1/2); None without stochastic rounding.
    """
    centred = piece if grid.offset is None else piece - across(grid.offset, piece)
    # The clamp stands between the product and every sum, so no compiler fuses them.
    code = jnp.minimum(centred * across(grid.inverse, piece), float(rule.half - 1))
    if not (rule.symmetric and rule.scale == "bound"):  # there no product rounds to a lower code
        code = jnp.maximum(code, -float(rule.half))
    if rule.stochastic:
        assert chance is not None
        code = code + chance
    return machine.integer(code)


def decode(code: jax.Array, step: jax.Array, offset: jax.Array | None, rule: Rule) -> jax.Array:
    """Return the values of a piece, float32[T, C].

    Args:
      code: whole numbers, float32[T, C].
      step: float32[T].
      offset: float32[T]; None if the rule is symmetric.
      rule: the rule that made the step.
    """
    if rule.exact:
        value = code * across(step, code)
    else:
        # The step is cut into two parts whose products with a code are exact. Their sum is rounded
        # once, and no compiler can fuse it with a later addition.
        leading = truncated(step)
        value = code * across(leading, code) + code * across(step - leading, code)
    return value if offset is None else value + across(offset, code)
