"""Codes and their values: the same lines run in the XLA reference and in every kernel.

    T        blocks, one a row
    C        elements of one piece of each block
    piece    float32[T, C]; the pieces of a block together are the block
    row      one number a block: [T]

`value = code x step + offset`, and a `Grid` is the step and the offset of each block. Compilers of
different machines must give the same bits, so besides what floats.py does,

* every sum over a block is one of integers;
* a product feeds a sum only where the product is exact, so that a compiler which makes one
  multiply-add of the two changes nothing;
* no step is below 2^-98, so that hardware which flushes subnormals to zero gives the same codes.
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
    """What decides the codes of a block.

    Attributes:
      bits: of a code, 8 or 4; codes lie in [-2^(bits-1), 2^(bits-1) - 1].
      symmetric: there is no offset.
      scale: how the step is chosen (scales.py).
      stochastic: a value between two codes takes the upper one with the probability of its
        fraction, instead of the nearer one. Only with the scale "bound", which clips nothing.
      short: steps and offsets have the 8 significant bits of a bfloat16.
    """

    bits: int
    symmetric: bool
    scale: Literal["bound", "mse", "deepspeed"]
    stochastic: bool
    short: bool

    @property
    def half(self) -> int:
        """The number of negative codes."""
        return 1 << (self.bits - 1)


class Machine(NamedTuple):
    """What each backend has its own words for.

    Attributes:
      nearest: float32[T, C] to the nearest integers, to even on ties, as float32.
      largest: the largest of each row of int32[T, C]: int32[T].
      total: the sum of each row of int32[T, C]: int32[T].
      keep: identity, which has a compiler compute a grid once instead of for every element.
    """

    nearest: Callable[[jax.Array], jax.Array]
    largest: Callable[[jax.Array], jax.Array]
    total: Callable[[jax.Array], jax.Array]
    keep: Callable[[Grid], Grid]


def round_to_even(x: jax.Array) -> jax.Array:
    """Return x rounded to the nearest integer, to even on ties, as float32."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


class Grid(NamedTuple):
    """The values that codes stand for; every field is a row.

    Attributes:
      step: float32, not zero; negative where the rule "mse" says so.
      inverse: float32, 1 / step.
      offset: float32, or None where the rule is symmetric.
      finite: bool, whether the block is; where not, step and offset are NaN.
    """

    step: jax.Array
    inverse: jax.Array
    offset: jax.Array | None
    finite: jax.Array


def across(row: jax.Array, piece: jax.Array) -> jax.Array:
    """Return each block's number along its elements: [T] -> [T, C]."""
    return lax.broadcast_in_dim(row, piece.shape, (0,))


def encode(
    piece: jax.Array,
    grid: Grid,
    rule: Rule,
    machine: Machine,
    uniform: jax.Array | None = None,
) -> jax.Array:
    """Return a piece's codes, int32[T, C]; zero where the block is not finite.

    Args:
      piece: float32[T, C].
      grid: of its blocks.
      rule: that made the grid.
      machine: where this runs.
      uniform: float32[T, C] in (0, 1), for stochastic rounding.
    """
    centred = piece if grid.offset is None else piece - across(grid.offset, piece)
    inverse = across(grid.inverse, piece)
    nearest = machine.nearest(centred * inverse)
    if rule.scale == "bound":
        # The step has 16 bits and a code 8: their product is exact, and so is what it leaves.
        step = across(grid.step, piece)
        rest = centred - nearest * step
        if rule.stochastic:
            assert uniform is not None
            under = jnp.where(rest < 0, 1.0, 0.0)
            rest = rest + under * step
            nearest = nearest - under + jnp.where(rest * inverse > uniform, 1.0, 0.0)
        else:
            # The product with the inverse was rounded: next to a tie it may have missed.
            most = step * 0.5
            nearest = nearest + jnp.where(rest > most, 1.0, 0.0) - jnp.where(rest < -most, 1.0, 0.0)
    code = jnp.minimum(jnp.maximum(nearest, -float(rule.half)), float(rule.half - 1))
    return jnp.where(across(grid.finite, piece), code, 0.0).astype(jnp.int32)


def decode(code: jax.Array, step: jax.Array, offset: jax.Array | None) -> jax.Array:
    """Return a piece's values, float32[T, C]: `code x step` rounded once, and once more where an
    offset is added.

    Args:
      code: int32[T, C].
      step: float32[T].
      offset: float32[T], or None.
    """
    code = code.astype(jnp.float32)
    # In two parts, each exact times a code: whoever adds to their sum can not reach a product.
    leading = truncated(step)
    value = code * across(leading, code) + code * across(step - leading, code)
    return value if offset is None else value + across(offset, code)
