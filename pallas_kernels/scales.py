"""The grid of each block: which step, and which offset.

* "bound": the smallest step for which no error is above step / 2, the peaks included:
  peak / (2^(bits-1) - 1/2), or range / 2^bits with an offset. Rounded up to 16 significant bits.
* "deepspeed": DeepSpeed's `csrc/includes/quantization_utils.h`: peak / 2^(bits-1), so that a
  positive peak is clipped by one step; or range / 2^bits about the centre, likewise.
* "mse": of DeepSpeed's and several other steps the one with the smallest squared error. The peak
  goes to the end of the codes that has one more, for which the step may be negative; DeepSpeed's
  step is left only for one that is surely better, so no block is ever worse.

A block with a magnitude below 2^-90 at most is zero: step 1, codes 0. One with an inf or a NaN gets
the step NaN and the codes 0: all of it decodes to NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arithmetic import Grid, Machine, Rule, across, decode, encode
from pallas_kernels.floats import (
    INFINITY,
    MAGNITUDE,
    NAN,
    SIGN,
    above,
    bits_of,
    float_of,
    ordered,
    reciprocal,
    rounded_up,
    shortened,
    truncated,
)

TINY = 2.0**-90
SMALLEST_STEP = 2.0**-98

# The steps that "mse" tries besides DeepSpeed's, as peak / (2^(bits-1) x factor). A factor above 1
# clips the peak for the sake of all others.
FACTORS = {8: (255 / 256, 1.0), 4: (15 / 16, 1.0, 1.15, 1.32)}
# No error of these is above 2^2 steps: codes end at 7, and a peak lies at most at 1.32 x 8.
_LARGEST_ERROR_LOG2 = 2
# The part of DeepSpeed's squared error by which another must be smaller: it covers every rounding
# in the comparison.
_ADVANTAGE = 2.0**-16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The elements of a block that count.

    Attributes:
      length: how many.
      machine: where this runs.
      valid: bool[T, C] for each piece, False on padding; None where there is none.
    """

    length: int
    machine: Machine
    valid: Sequence[jax.Array] | None = None

    def largest(self, keys: Sequence[jax.Array]) -> jax.Array:
        """Return the largest of each block's integers: [T]."""
        return self.machine.largest(functools.reduce(jnp.maximum, keys))

    def where(self, i: int, values: jax.Array, otherwise: int) -> jax.Array:
        """Return values of piece i, and `otherwise` in place of padding."""
        return values if self.valid is None else jnp.where(self.valid[i], values, otherwise)


def grid_of(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    """Return the grid of each block.

    Args:
      pieces: float32[T, C] each; padding is zero.
      rule: how.
      block: what counts of it.
    """
    grid = (_symmetric if rule.symmetric else _with_offset)(pieces, rule, block)
    return block.machine.keep(grid)


def _symmetric(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    sign = None
    if rule.scale == "mse":
        # As integers, negative floats are negative: these are the largest of x and of -x.
        positive = block.largest([bits_of(piece) for piece in pieces])
        negative = block.largest([bits_of(piece) ^ SIGN for piece in pieces])
        sign = jnp.where(negative >= positive, 1.0, -1.0)
        peak = jnp.maximum(positive, negative)
    else:
        peak = block.largest([bits_of(piece) & MAGNITUDE for piece in pieces])
    finite = peak < INFINITY
    peak = float_of(peak)
    zero = peak < TINY
    peak = jnp.where(finite, jnp.where(zero, 1.0, peak), 1.0)

    if rule.scale == "bound":
        codes = rule.half - (1 if rule.stochastic else 0.5)
        step = rounded_up(peak * above(1 / codes), short=rule.short)
        grid = Grid(step, reciprocal(step), None, finite)
    else:
        grid = _deepspeed(peak, None, finite, rule)
    grid = _zero_where(zero, grid)
    if rule.scale == "mse":
        candidates = []
        for factor in FACTORS[rule.bits]:
            step = _stored(peak * np.float32(1 / (rule.half * factor)), rule)
            candidates.append(Grid(step * sign, reciprocal(step) * sign, None, finite))
        grid = _best(pieces, grid, candidates, rule, block)
    return _nan_where_not_finite(grid)


def _with_offset(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    keys = [ordered(bits_of(piece)) for piece in pieces]
    top = block.largest([block.where(i, key, SIGN) for i, key in enumerate(keys)])
    bottom = ~block.largest([block.where(i, ~key, SIGN) for i, key in enumerate(keys)])
    finite = (top < INFINITY) & (bottom > ~INFINITY)
    top, bottom = (_without_tiny(key, finite) for key in (top, bottom))
    # Halves: the range of two finite numbers may not be finite. A product with 1/2 is exact.
    centre, radius = top * 0.5 + bottom * 0.5, top * 0.5 - bottom * 0.5
    constant = radius == 0
    radius = jnp.where(constant, 1.0, jnp.maximum(radius, TINY))

    if rule.scale == "bound":
        # The codes reach so many steps below and above the offset without a larger error.
        reach = 0.0 if rule.stochastic else 0.5
        down, up = rule.half + reach, rule.half - 1 + reach
        offset = _half_a_step_over(centre, radius * np.float32(2 / (down + up)), rule)
        offset = jnp.where(constant, _stored(centre, rule), offset)
        step = jnp.maximum((offset - bottom) * above(1 / down), (top - offset) * above(1 / up))
        constant = step == 0
        step = rounded_up(jnp.maximum(step, SMALLEST_STEP), short=rule.short)
        grid = Grid(step, reciprocal(step), offset, finite)
    else:
        grid = _deepspeed(radius, _stored(centre, rule), finite, rule)
    grid = _zero_where(constant, grid)
    if rule.scale == "mse":
        candidates = []
        for factor in FACTORS[rule.bits]:
            step = _stored(radius * np.float32(1 / (rule.half * factor)), rule)
            offset = _half_a_step_over(centre, step, rule)
            candidates.append(Grid(step, reciprocal(step), offset, finite))
        grid = _best(pieces, grid, candidates, rule, block)
    return _nan_where_not_finite(grid)


def _deepspeed(peak: jax.Array, offset: jax.Array | None, finite: jax.Array, rule: Rule) -> Grid:
    inverse = reciprocal(peak, rule.bits - 1)
    step = reciprocal(inverse)
    if rule.short:
        step = shortened(step)
        inverse = reciprocal(step)
    return Grid(step, inverse, offset, finite)


def _best(
    pieces: Sequence[jax.Array], base: Grid, candidates: Sequence[Grid], rule: Rule, block: Block
) -> Grid:
    """Return `base`, or per block a candidate whose squared error is surely smaller.

    Squared errors, in squared steps, are cut off to multiples of 2^-k, the finest for which a
    block's sum fits in 31 bits: a sum is low by less than the block's length.
    """
    spare = 31 - 2 * _LARGEST_ERROR_LOG2 - math.ceil(math.log2(block.length))
    unit = np.float32(2.0 ** (spare // 2))  # of an error; k is twice the exponent

    def cost(grid: Grid, low_by: int) -> jax.Array:
        grid = block.machine.keep(grid)
        squares = []
        for i, piece in enumerate(pieces):
            error = piece - decode(encode(piece, grid, rule, block.machine), grid.step, grid.offset)
            error = error * across(grid.inverse * unit, piece)
            squares.append(block.where(i, (error * error).astype(jnp.int32), 0))
        total = block.machine.total(functools.reduce(jnp.add, squares)) + low_by
        relative = grid.step * base.inverse
        return total.astype(jnp.float32) * (relative * relative)

    best, least = base, cost(base, 0) * np.float32(1 - _ADVANTAGE)
    for candidate in candidates:
        here = cost(candidate, block.length)
        better = here < least
        least = jnp.where(better, here, least)
        best = _where(better, candidate, best)
    return best


def _half_a_step_over(centre: jax.Array, step: jax.Array, rule: Rule) -> jax.Array:
    """Return the offset about which the codes, of which one more is negative, lie evenly."""
    return _stored(centre + truncated(step) * 0.5, rule)


def _stored(x: jax.Array, rule: Rule) -> jax.Array:
    return shortened(x) if rule.short else x


def _without_tiny(key: jax.Array, finite: jax.Array) -> jax.Array:
    x = float_of(ordered(key))
    return jnp.where(finite, jnp.where(jnp.abs(x) < TINY, 0.0, x), 0.0)


def _where(condition: jax.Array, new: Grid, old: Grid) -> Grid:
    return Grid(*(None if a is None else jnp.where(condition, a, b) for a, b in zip(new, old)))


def _zero_where(zero: jax.Array, grid: Grid) -> Grid:
    one = jnp.ones_like(grid.step)
    return grid._replace(
        step=jnp.where(zero, one, grid.step), inverse=jnp.where(zero, one, grid.inverse)
    )


def _nan_where_not_finite(grid: Grid) -> Grid:
    nan = np.uint32(NAN).view(np.float32)
    step, offset = (
        None if row is None else jnp.where(grid.finite, row, nan)
        for row in (grid.step, grid.offset)
    )
    return grid._replace(step=step, offset=offset)
