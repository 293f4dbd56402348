"""Chooses the grid of each block: its step, and its offset if the rule has one.

* "bound": the smallest step with which no error exceeds step / 2, not even at a peak, but for the
  roundings of a code, 2^-15 of a step. It is peak / (2^(bits-1) - 1/2), or range / 2^bits with an
  offset, rounded up to 16 significant bits.
* "deepspeed": the rule of DeepSpeed's `csrc/includes/quantization_utils.h`. The step is
  peak / 2^(bits-1), which clips a positive peak by one step, or range / 2^bits about the centre,
  which clips the top likewise.
* "mse": a step with a small squared error. With 8 bits it is peak / 2^(bits-1). With 4 bits it is
  that, or a shorter one that clips the largest elements, if that pays: see `_shrunk`. The peak goes
  to the end of the codes that has one code more, so the step may be negative.

A block whose magnitudes are all below 2^-90 is zero: it gets step 1 and codes 0. A block with an
inf, a NaN or a magnitude of 2^126 or more, where the value of a code may be infinite, is not
finite: it gets step NaN and codes 0, so that all of it decodes to NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arithmetic import Grid, Machine, Rule, across
from .floats import (
    NAN,
    SIGN,
    above,
    bits_of,
    float_of,
    inverse_of,
    ordered,
    reciprocal,
    rounded_up,
    shortened,
    truncated,
)

TINY = 2.0**-90
SMALLEST_STEP = 2.0**-98
LONGEST = 2**19  # a longer block of "mse" clips nothing
_HUGE = 2.0**126
_NOTHING = 2.0**-120  # taken for 0 in a block that is not zero; half of it is no subnormal


def shares(length: int) -> tuple[float, float]:
    """Return what the 4-bit "mse" step of a block takes of the block's peak and of its mean
    magnitude, where clipping pays: step = first x peak + second x mean.

    Fitted to blocks of 32 to 2048 numbers: normal, Laplace, Student's t (3), uniform, log-normal,
    normal with one outlier, and the weights and gradients of a GPT.
    """
    log2 = math.log2(length)
    return max(0.02, 0.166 - 0.0092 * log2), max(0.0, 0.02 * (log2 - 4))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The elements of a block without padding.

    Attributes:
      length: their number.
      machine: the backend's operations.
      valid: bool[T, C] for each piece, False on padding; None if there is no padding.
      loaded: the pieces before their conversion to float32; None if they are not needed.
    """

    length: int
    machine: Machine
    valid: Sequence[jax.Array] | None = None
    loaded: Sequence[jax.Array] | None = None

    def largest(self, keys: Sequence[jax.Array]) -> jax.Array:
        """Return the largest number of each block: [T]."""
        return self.machine.largest(keys)

    def ends(self, pieces: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return the largest and the smallest number of each block: float32[T] each."""
        return self.machine.largest(pieces), self.machine.smallest(pieces)

    def total(self, terms: Sequence[jax.Array]) -> jax.Array:
        """Return the sum of each block: [T]. Sums of whole numbers must be below 2^24."""
        return self.machine.total(functools.reduce(jnp.add, terms))

    def where(self, i: int, values: jax.Array, otherwise: float) -> jax.Array:
        """Return the values of piece i, with `otherwise` in place of padding."""
        return values if self.valid is None else jnp.where(self.valid[i], values, otherwise)


def grid_of(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    """Return the grid of each block.

    Args:
      pieces: float32[T, C] each; padding is zero.
      rule: the rule that chooses step and offset.
      block: the elements that are not padding.
    """
    grid = (_symmetric if rule.symmetric else _with_offset)(pieces, rule, block)
    return block.machine.keep(grid)


def _symmetric(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    """Return the grids without offsets."""
    if rule.scale == "mse" or block.loaded:
        top, bottom = block.ends(block.loaded or pieces)
        peak = jnp.maximum(top, -bottom)
        # With "mse" the peak goes to the end of the codes that has one code more.
        sign = jnp.where(top < peak, 1.0, -1.0)
    else:
        peak = block.largest([jnp.abs(piece) for piece in pieces])
        sign = jnp.ones_like(peak)
    finite = peak < _HUGE
    zero = peak < TINY
    peak = jnp.where(finite, jnp.where(zero, 1.0, peak), 1.0)

    if rule.scale == "deepspeed":
        grid = _deepspeed(peak, None, finite, rule)
    elif rule.scale == "bound":
        codes = rule.half - (1 if rule.stochastic else 0.5)
        step = rounded_up(peak * above(1 / codes), short=rule.short)
        grid = Grid(step, inverse_of(step), None, finite)
    else:
        step = _shrunk(pieces, peak * np.float32(1 / rule.half), None, rule, block)
        grid = Grid(step * sign, inverse_of(step) * sign, None, finite)
    return _nan_where_not_finite(_one_where(zero, grid))


def _with_offset(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    """Return the grids with offsets."""
    keys = [ordered(bits_of(piece)) for piece in pieces]
    top = block.largest([block.where(i, key, SIGN) for i, key in enumerate(keys)])
    bottom = ~block.largest([block.where(i, ~key, SIGN) for i, key in enumerate(keys)])
    top, bottom = (float_of(ordered(key)) for key in (top, bottom))
    finite = (top < _HUGE) & (bottom > -_HUGE)
    top, bottom = (jnp.where(finite, x, 0.0) for x in (top, bottom))
    zero = jnp.maximum(jnp.abs(top), jnp.abs(bottom)) < TINY
    top, bottom = (jnp.where(zero | (jnp.abs(x) < _NOTHING), 0.0, x) for x in (top, bottom))
    # Halves are taken first, because the range of two finite numbers may not be finite. A product
    # with 1/2 is exact.
    centre, radius = top * 0.5 + bottom * 0.5, top * 0.5 - bottom * 0.5

    def spanning(down: float, up: float) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (step, offset, whether all elements are one value).

        The bottom lies at most `down` steps below the offset, and the top at most `up` above it,
        which is one less.
        """
        middle = truncated(radius * np.float32(2 / (down + up)))
        offset = _stored(centre + middle * 0.5, rule)
        # The step is measured from the offset as it is stored.
        step = jnp.maximum((offset - bottom) * above(1 / down), (top - offset) * above(1 / up))
        return jnp.maximum(step, SMALLEST_STEP), offset, step == 0

    if rule.scale == "bound":
        # How many steps beyond the last code a value may lie without an error above half a step.
        reach = 0.0 if rule.stochastic else 0.5
        step, offset, constant = spanning(rule.half + reach, rule.half - 1 + reach)
        step = rounded_up(step, short=rule.short)
        grid = Grid(step, inverse_of(step), offset, finite)
        return _nan_where_not_finite(_one_where(constant, grid))

    if rule.scale == "mse":
        step, offset, constant = spanning(rule.half + 0.5, rule.half - 0.5)
        step = _shrunk(pieces, step, offset, rule, block)
        grid = Grid(step, inverse_of(step), offset, finite)
        return _nan_where_not_finite(_one_where(constant, grid))

    middle = _stored(centre, rule)
    # DeepSpeed stores the centre unrounded. About a rounded centre, the ends lie unevenly.
    wider = jnp.maximum(top - middle, middle - bottom) if rule.short else radius
    constant = wider == 0
    wider = jnp.where(constant, 1.0, jnp.maximum(wider, TINY))
    return _nan_where_not_finite(_one_where(constant, _deepspeed(wider, middle, finite, rule)))


def _deepspeed(peak: jax.Array, offset: jax.Array | None, finite: jax.Array, rule: Rule) -> Grid:
    """Return the grids that DeepSpeed's rule gives."""
    inverse = reciprocal(peak, rule.bits - 1)
    step = reciprocal(inverse)
    if rule.short:
        step = shortened(step)
        inverse = reciprocal(step)
    return Grid(step, inverse, offset, finite)


def _shrunk(
    pieces: Sequence[jax.Array],
    step: jax.Array,
    offset: jax.Array | None,
    rule: Rule,
    block: Block,
) -> jax.Array:
    """Return the step of "mse", with the significant bits that are stored.

    With 4 bits there are two candidates: a step s that clips nothing, and a shorter one t, see
    `shares`. An error of rounding is step^2 / 12 in the mean, and no larger than the element, so
    about min(length, sum / t) elements gain (s^2 - t^2) / 12 each. The squared errors of what lies
    beyond 8 t are at most the sum of all that is beyond, times 8 s - 8 t. The shorter step is taken
    if the gain is more than 4/3 of that.

    `benchmarks/quantize_accuracy.py` compares the error with that of DeepSpeed's rule. "Limits" in
    docs/quantize.md says on which numbers that rule is better.

    Args:
      pieces: float32[T, C] each; padding is zero.
      step: the step that clips nothing: float32[T], positive.
      offset: the offset of each block, float32[T]; None if the rule is symmetric.
      rule: the rule, "mse".
      block: the elements that are not padding.
    """
    of_peak, of_mean = shares(block.length)
    if rule.bits == 4 and of_peak < 1 / rule.half and block.length <= LONGEST:
        # Magnitudes are rounded to multiples of a power of two, the finest for which their sum is
        # below 2^24. All numbers here count such multiples. No magnitude is above 16 steps, and
        # no step above the power of two after it.
        fine = min(22, 24 - math.ceil(math.log2(block.length))) - 5
        exponent = lax.shift_right_logical(bits_of(step), jnp.int32(23)) - 127
        there, back = _power_of_two(fine - exponent), _power_of_two(exponent - fine)
        magnitudes = []
        for i, piece in enumerate(pieces):
            centred = piece if offset is None else piece - across(offset, piece)
            magnitude = jnp.abs(block.machine.nearest(centred * across(there, piece)))
            magnitudes.append(magnitude if offset is None else block.where(i, magnitude, 0.0))
        total = block.total(magnitudes)
        step = step * there
        # Factors have 8 significant bits and what they multiply 16, so the products are exact.
        clipping = truncated(step) * brief(8 * of_peak)
        clipping = clipping + truncated(total) * brief(of_mean / block.length)
        clipping = jnp.minimum(step, clipping)
        # No product below feeds a sum.
        end, top = (block.machine.nearest(rule.half * x) for x in (clipping, step))
        reaching = [jnp.maximum(x, across(end, x)) for x in magnitudes]
        reaching = [block.where(i, x, 0.0) for i, x in enumerate(reaching)]
        beyond = block.total(reaching) - block.length * end
        lost = (top - end) * beyond * (16 * clipping)
        gained = jnp.minimum(block.length * clipping, total) * (
            (step - clipping) * (step + clipping)
        )
        step = jnp.where(lost < gained, clipping, step) * back
    return shortened(step) if rule.short else truncated(step)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^exponent, float32; the exponent is an int32 from -126 to 127."""
    return float_of(lax.shift_left(exponent + 127, jnp.int32(23)))


def brief(x: float) -> np.float32:
    """Return x with 8 significant bits."""
    mantissa, exponent = math.frexp(x)
    return np.float32(math.ldexp(round(mantissa * 256), exponent - 8))


def _stored(x: jax.Array, rule: Rule) -> jax.Array:
    """Round steps or offsets to the dtype that they are stored in."""
    return shortened(x) if rule.short else x


def _one_where(alike: jax.Array, grid: Grid) -> Grid:
    """Set the step to 1 for blocks whose elements are all alike."""
    step, inverse = (jnp.where(alike, 1.0, row) for row in (grid.step, grid.inverse))
    return grid._replace(step=step, inverse=inverse)


def _nan_where_not_finite(grid: Grid) -> Grid:
    """Set step and offset to NaN for blocks that are not finite."""
    nan = np.uint32(NAN).view(np.float32)
    step, offset = (
        None if row is None else jnp.where(grid.finite, row, nan)
        for row in (grid.step, grid.offset)
    )
    return grid._replace(step=step, offset=offset)
