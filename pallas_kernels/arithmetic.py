"""Codes and their values: the same lines run in the XLA reference and in every kernel.

    T        number of blocks, one in each row
    C        number of elements in one piece of a block
    piece    float32[T, C]; the pieces of a block together make up the block
    row      one number for each block: [T]

`value = code x step + offset`, and a `Grid` holds the step and the offset of each block. Compilers
for different machines must give the same bits. So, besides the rules of floats.py,

* every sum over a block is a sum of integers;
* a product feeds a sum only if the product is exact. A compiler that fuses the two into one
  multiply-add then changes nothing;
* no step is below 2^-98. Hardware that flushes subnormals to zero then gives the same codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .floats import truncated


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


class Machine(NamedTuple):
    """The operations that each backend writes in its own way.

    Attributes:
      nearest: rounds float32[T, C] to the nearest integers, to even on ties, as float32.
      largest: returns the largest number in each row of int32[T, C], as int32[T].
      total: returns the sum of each row of int32[T, C], as int32[T].
      keep: returns a grid unchanged, and makes the compiler compute it once instead of once for
        every element.
    """

    nearest: Callable[[jax.Array], jax.Array]
    largest: Callable[[jax.Array], jax.Array]
    total: Callable[[jax.Array], jax.Array]
    keep: Callable[[Grid], Grid]


def round_to_even(x: jax.Array) -> jax.Array:
    """Round x to the nearest integer, to even on ties; return float32."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


class Grid(NamedTuple):
    """The values that the codes of each block stand for. Every field is a row.

    Attributes:
      step: float32, not zero. It may be negative with the scale "mse".
      inverse: float32, 1 / step.
      offset: float32; None if the rule is symmetric.
      finite: bool, whether the block is finite. If not, its step and offset are NaN.
    """

    step: jax.Array
    inverse: jax.Array
    offset: jax.Array | None
    finite: jax.Array


def across(row: jax.Array, piece: jax.Array) -> jax.Array:
    """Repeat each block's number along its elements: [T] -> [T, C]."""
    return lax.broadcast_in_dim(row, piece.shape, (0,))


def encode(
    piece: jax.Array,
    grid: Grid,
    rule: Rule,
    machine: Machine,
    uniform: jax.Array | None = None,
) -> jax.Array:
    """Return the codes of a piece, int32[T, C]. Those of a block that is not finite are zero.

    Args:
      piece: float32[T, C].
      grid: the grid of its blocks.
      rule: the rule that made the grid.
      machine: the backend's operations.
      uniform: random numbers, float32[T, C] in (0, 1); None without stochastic rounding.
    """
    centred = piece if grid.offset is None else piece - across(grid.offset, piece)
    inverse = across(grid.inverse, piece)
    nearest = machine.nearest(centred * inverse)
    if rule.scale == "bound":
        # The step has 16 bits and a code 8. So their product is exact, and the rest too.
        step = across(grid.step, piece)
        rest = centred - nearest * step
        if rule.stochastic:
            assert uniform is not None
            under = jnp.where(rest < 0, 1.0, 0.0)
            rest = rest + under * step
            nearest = nearest - under + jnp.where(rest * inverse > uniform, 1.0, 0.0)
        else:
            # The product with the inverse was rounded, so near a tie the code may be one off.
            most = step * 0.5
            nearest = nearest + jnp.where(rest > most, 1.0, 0.0) - jnp.where(rest < -most, 1.0, 0.0)
    code = jnp.minimum(jnp.maximum(nearest, -float(rule.half)), float(rule.half - 1))
    return jnp.where(across(grid.finite, piece), code, 0.0).astype(jnp.int32)


def decode(code: jax.Array, step: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Return the values of a piece, float32[T, C].

    `code x step` is rounded once, and once more if an offset is added.

    Args:
      code: int32[T, C].
      step: float32[T].
      offset: float32[T]; None if the rule is symmetric.
    """
    code = code.astype(jnp.float32)
    # The step is cut into two parts whose products with a code are exact. No compiler can then fuse
    # a product with a later addition, because only the sum of the two is added to.
    leading = truncated(step)
    value = code * across(leading, code) + code * across(step - leading, code)
    return value if offset is None else value + across(offset, code)
