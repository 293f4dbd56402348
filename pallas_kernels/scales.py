"""Chooses the grid of each block: its step, and its offset if the rule has one.

* "bound": the smallest step with which no error exceeds step / 2, not even at a peak. It is
  peak / (2^(bits-1) - 1/2), or range / 2^bits with an offset, rounded up to 16 significant bits.
* "deepspeed": the rule of DeepSpeed's `csrc/includes/quantization_utils.h`. The step is
  peak / 2^(bits-1), which clips a positive peak by one step, or range / 2^bits about the centre,
  which clips the top likewise.
* "mse": DeepSpeed's step or one of several others, whichever has the smallest squared error. The
  peak goes to the end of the codes that has one code more, so the step may be negative. DeepSpeed's
  step is left only for one that is surely better, so no block is ever worse.

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

from .arithmetic import Grid, Machine, Rule, across, decode, encode
from .floats import (
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
_HUGE = 0x7E800000  # the bits of 2^126
SMALLEST_STEP = 2.0**-98
_NOTHING = 2.0**-120  # taken for 0 in a block that is not zero; half of it is no subnormal

# The steps that "mse" tries besides DeepSpeed's are peak / (2^(bits-1) x factor). A factor above 1
# clips the peak for the sake of all other elements.
FACTORS = {8: (1.0, 1.005), 4: (1.0, 1.1, 1.29, 1.6)}
# With these no error exceeds 2^3 steps: codes end at 7, and a peak lies at most at 1.6 x 8.
_LARGEST_ERROR_LOG2 = 3
# Another squared error must be smaller than DeepSpeed's by this part of it, which covers every
# rounding in the comparison.
_ADVANTAGE = 2.0**-16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The elements of a block without padding.

    Attributes:
      length: their number.
      machine: the backend's operations.
      valid: bool[T, C] for each piece, False on padding; None if there is no padding.
    """

    length: int
    machine: Machine
    valid: Sequence[jax.Array] | None = None

    def largest(self, keys: Sequence[jax.Array]) -> jax.Array:
        """Return the largest integer of each block: [T]."""
        return self.machine.largest(functools.reduce(jnp.maximum, keys))

    def where(self, i: int, values: jax.Array, otherwise: int) -> jax.Array:
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
    sign = jnp.float32(1)
    if rule.scale == "mse":
        # The bits of a negative float are a negative integer. So these are the largest x and -x.
        positive = block.largest([bits_of(piece) for piece in pieces])
        negative = block.largest([bits_of(piece) ^ SIGN for piece in pieces])
        sign = jnp.where(negative >= positive, 1.0, -1.0)
        peak = jnp.maximum(positive, negative)
    else:
        peak = block.largest([bits_of(piece) & MAGNITUDE for piece in pieces])
    finite = peak < _HUGE
    peak = float_of(peak)
    zero = peak < TINY
    peak = jnp.where(finite, jnp.where(zero, 1.0, peak), 1.0)

    if rule.scale == "bound":
        codes = rule.half - (1 if rule.stochastic else 0.5)
        step = rounded_up(peak * above(1 / codes), short=rule.short)
        grid = Grid(step, reciprocal(step), None, finite)
    else:
        grid = _deepspeed(peak, None, finite, rule)
    grid = _one_where(zero, grid)
    if rule.scale == "mse":
        candidates = []
        for factor in FACTORS[rule.bits]:
            step = _stored(peak * np.float32(1 / (rule.half * factor)), rule)
            candidates.append(Grid(step * sign, reciprocal(step) * sign, None, finite))
        grid = _best(pieces, grid, candidates, rule, block)
    return _nan_where_not_finite(grid)


def _with_offset(pieces: Sequence[jax.Array], rule: Rule, block: Block) -> Grid:
    """Return the grids with offsets."""
    keys = [ordered(bits_of(piece)) for piece in pieces]
    top = block.largest([block.where(i, key, SIGN) for i, key in enumerate(keys)])
    bottom = ~block.largest([block.where(i, ~key, SIGN) for i, key in enumerate(keys)])
    finite = (top < _HUGE) & (bottom > ~_HUGE)
    top, bottom = (jnp.where(finite, float_of(ordered(key)), 0.0) for key in (top, bottom))
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
        grid = Grid(step, reciprocal(step), offset, finite)
        return _nan_where_not_finite(_one_where(constant, grid))

    middle = _stored(centre, rule)
    # DeepSpeed stores the centre unrounded. About a rounded centre, the ends lie unevenly.
    wider = jnp.maximum(top - middle, middle - bottom) if rule.short else radius
    constant = wider == 0
    wider = jnp.where(constant, 1.0, jnp.maximum(wider, TINY))
    grid = _one_where(constant, _deepspeed(wider, middle, finite, rule))
    if rule.scale == "mse":
        candidates = []
        for factor in FACTORS[rule.bits]:
            step, offset, constant = spanning(rule.half * factor + 0.5, rule.half * factor - 0.5)
            step = _stored(step, rule)
            candidate = Grid(step, reciprocal(step), offset, finite)
            candidates.append(_one_where(constant, candidate))
        grid = _best(pieces, grid, candidates, rule, block)
    return _nan_where_not_finite(grid)


def _deepspeed(peak: jax.Array, offset: jax.Array | None, finite: jax.Array, rule: Rule) -> Grid:
    """Return the grids that DeepSpeed's rule gives."""
    inverse = reciprocal(peak, rule.bits - 1)
    step = reciprocal(inverse)
    if rule.short:
        step = shortened(step)
        inverse = reciprocal(step)
    return Grid(step, inverse, offset, finite)


def _best(
    pieces: Sequence[jax.Array], base: Grid, candidates: Sequence[Grid], rule: Rule, block: Block
) -> Grid:
    """Return `base`, or for each block the best candidate whose squared error is surely smaller.

    Squared errors, in squared steps, are cut off to multiples of 2^-k, the finest for which the sum
    over a block fits in 31 bits. A sum is therefore too low, by less than the block's length. An
    error of `base` may be too large for 31 bits, and then counts as smaller than it is.
    """
    spare = 31 - 2 * _LARGEST_ERROR_LOG2 - math.ceil(math.log2(block.length))
    unit = 2.0 ** (spare // 2)  # of an error; k is twice the exponent
    largest = np.float32(31 / 32 * (unit * 2**_LARGEST_ERROR_LOG2) ** 2)  # 2^31 itself does not fit

    def cost(grid: Grid, low_by: int) -> jax.Array:
        grid = block.machine.keep(grid)
        squares = []
        for i, piece in enumerate(pieces):
            code = encode(piece, grid, rule, block.machine)
            error = piece - decode(code, grid.step, grid.offset)
            error = error * across(grid.inverse * np.float32(unit), piece)
            square = jnp.minimum(error * error, largest).astype(jnp.int32)
            squares.append(block.where(i, square, 0))
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


def _stored(x: jax.Array, rule: Rule) -> jax.Array:
    """Round steps or offsets to the dtype that they are stored in."""
    return shortened(x) if rule.short else x


def _where(condition: jax.Array, new: Grid, old: Grid) -> Grid:
    """Return the new grid of each block where the condition holds, otherwise the old one."""
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


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
