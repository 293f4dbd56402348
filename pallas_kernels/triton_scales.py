"""The grid of each block in Triton: the lines of scales.py once more.

T         number of blocks, one in each row
C         number of elements in one piece of a block, and padding up to a power of two
pieces    a tuple of float32[T, C]; padding is zero
insides   a tuple of bool[T, C], False on padding; only read where `padded`
grid      (step, inverse, offset, finite) of each block, [T] each; offset is 0 without offsets
shape     a triton.Shape: the rule, and the numbers that scales.py takes from a block's length
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_arithmetic import (
    bits_of,
    down,
    float_of,
    inverse_of,
    nearest,
    reciprocal,
    rounded_up,
    shortened,
    truncated,
)

_NAN = tl.constexpr(0x7FC00000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_TINY = tl.constexpr(2.0**-90)
_NOTHING = tl.constexpr(2.0**-120)
_SMALLEST_STEP = tl.constexpr(2.0**-98)
_HUGE = tl.constexpr(2.0**126)


@triton.jit
def grid_of(pieces, insides, shape: tl.constexpr):
    """Return the grid of each block."""
    if shape.rule.symmetric:
        return _symmetric(pieces, insides, shape)
    else:
        return _with_offset(pieces, insides, shape)


@triton.jit
def _symmetric(pieces, insides, shape: tl.constexpr):
    """Return the grids without offsets."""
    rule: tl.constexpr = shape.rule
    # The bits of numbers that are not negative compare as the numbers do, and NaN is above all.
    top = bits_of(pieces[0])
    peak = top & _MAGNITUDE
    COUNT: tl.constexpr = len(pieces)
    for i in tl.static_range(1, COUNT):
        bits = bits_of(pieces[i])
        top = tl.maximum(top, bits)
        peak = tl.maximum(peak, bits & _MAGNITUDE)
    peak = tl.max(peak, 1)
    if rule.scale == "mse":
        # The peak goes to the end of the codes that has one code more.
        sign = tl.where(tl.max(top, 1) < peak, 1.0, -1.0)
    peak = float_of(peak)
    finite = peak < _HUGE
    zero = peak < _TINY
    peak = tl.where(finite, tl.where(zero, 1.0, peak), 1.0)
    if rule.scale == "deepspeed":
        step, inverse = _deepspeed(peak, rule)
    elif rule.scale == "bound":
        step = rounded_up(peak * shape.up, rule.short)
        inverse = inverse_of(step)
    else:
        step = _shrunk(pieces, insides, peak * (1.0 / rule.half), peak, shape)
        inverse = inverse_of(step) * sign
        step = step * sign
    return _finished(step, inverse, peak * 0.0, finite, zero)


@triton.jit
def _with_offset(pieces, insides, shape: tl.constexpr):
    """Return the grids with offsets."""
    rule: tl.constexpr = shape.rule
    COUNT: tl.constexpr = len(pieces)
    key = _ordered(bits_of(pieces[0]))
    top, bottom = key, key
    if shape.padded:
        top = tl.where(insides[0], key, _SIGN)
        bottom = tl.where(insides[0], key, _MAGNITUDE)
    for i in tl.static_range(1, COUNT):
        key = _ordered(bits_of(pieces[i]))
        if shape.padded:
            top = tl.maximum(top, tl.where(insides[i], key, _SIGN))
            bottom = tl.minimum(bottom, tl.where(insides[i], key, _MAGNITUDE))
        else:
            top = tl.maximum(top, key)
            bottom = tl.minimum(bottom, key)
    top = float_of(_ordered(tl.max(top, 1)))
    bottom = float_of(_ordered(tl.min(bottom, 1)))
    finite = (top < _HUGE) & (bottom > -1.0 * _HUGE)
    top = tl.where(finite, top, 0.0)
    bottom = tl.where(finite, bottom, 0.0)
    zero = tl.maximum(tl.abs(top), tl.abs(bottom)) < _TINY
    top = tl.where(zero | (tl.abs(top) < _NOTHING), 0.0, top)
    bottom = tl.where(zero | (tl.abs(bottom) < _NOTHING), 0.0, bottom)
    centre = top * 0.5 + bottom * 0.5
    radius = top * 0.5 - bottom * 0.5
    if rule.scale == "deepspeed":
        offset = _stored(centre, rule)
        wider = tl.maximum(top - offset, offset - bottom) if rule.short else radius
        alike = wider == 0
        step, inverse = _deepspeed(tl.where(alike, 1.0, tl.maximum(wider, _TINY)), rule)
    else:
        middle = truncated(radius * shape.middle)
        offset = _stored(centre + middle * 0.5, rule)
        step = tl.maximum((offset - bottom) * shape.down, (top - offset) * shape.up)
        alike = step == 0
        step = tl.maximum(step, _SMALLEST_STEP)
        if rule.scale == "bound":
            step = rounded_up(step, rule.short)
        else:
            step = _shrunk(pieces, insides, step, offset, shape)
        inverse = inverse_of(step)
    return _finished(step, inverse, offset, finite, alike)


@triton.jit
def _ordered(bits):
    """Change the bits of floats so that they compare as integers as the floats do, and back."""
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _stored(x, rule: tl.constexpr):
    """Round offsets to the dtype that they are stored in."""
    return shortened(x) if rule.short else x


@triton.jit
def _finished(step, inverse, offset, finite, alike):
    """Return the grid, with step 1 for blocks of one value, and NaN for those not finite."""
    step = tl.where(alike, 1.0, step)
    inverse = tl.where(alike, 1.0, inverse)
    nan = float_of(tl.full(step.shape, _NAN, tl.int32))
    return tl.where(finite, step, nan), inverse, tl.where(finite, offset, nan), finite


@triton.jit
def _deepspeed(peak, rule: tl.constexpr):
    """Return the steps and inverses that DeepSpeed's rule gives."""
    inverse = reciprocal(peak, rule.bits - 1)
    step = reciprocal(inverse, 0)
    if rule.short:
        step = shortened(step)
        inverse = reciprocal(step, 0)
    return step, inverse


@triton.jit
def _shrunk(pieces, insides, step, offset, shape: tl.constexpr):
    """Return the step of "mse", as `scales._shrunk` explains it."""
    rule: tl.constexpr = shape.rule
    if shape.shrinks:
        exponent = down(bits_of(step), 23) - 127
        there = _power_of_two(shape.fine - exponent)
        back = _power_of_two(exponent - shape.fine)
        COUNT: tl.constexpr = len(pieces)
        sums = _magnitude(pieces[0], insides, 0, offset, there, shape)
        for i in tl.static_range(1, COUNT):
            sums = sums + _magnitude(pieces[i], insides, i, offset, there, shape)
        total = tl.sum(sums, 1)
        step = step * there
        clipping = truncated(step) * shape.of_peak + truncated(total) * shape.of_mean
        clipping = tl.minimum(step, clipping)
        end = nearest(rule.half * clipping)
        top = nearest(rule.half * step)
        sums = _reaching(pieces[0], insides, 0, offset, there, end, shape)
        for i in tl.static_range(1, COUNT):
            sums = sums + _reaching(pieces[i], insides, i, offset, there, end, shape)
        beyond = tl.sum(sums, 1) - shape.length * end
        lost = (top - end) * beyond * (16 * clipping)
        gained = tl.minimum(shape.length * clipping, total)
        gained = gained * ((step - clipping) * (step + clipping))
        step = tl.where(lost < gained, clipping, step) * back
    return shortened(step) if rule.short else truncated(step)


@triton.jit
def _magnitude(x, insides, i: tl.constexpr, offset, there, shape: tl.constexpr):
    """Return the magnitudes of piece i as multiples of a power of two, float32[T, C]."""
    if not shape.rule.symmetric:
        x = x - offset[:, None]
    x = tl.abs(nearest(x * there[:, None]))
    if shape.padded and not shape.rule.symmetric:
        x = tl.where(insides[i], x, 0.0)
    return x


@triton.jit
def _reaching(x, insides, i: tl.constexpr, offset, there, end, shape: tl.constexpr):
    """Return `_magnitude`, but not less than `end`; 0 on padding."""
    x = tl.maximum(_magnitude(x, insides, i, offset, there, shape), end[:, None])
    if shape.padded:
        x = tl.where(insides[i], x, 0.0)
    return x


@triton.jit
def _power_of_two(exponent):
    """Return 2^exponent, float32; the exponent is an int32 from -126 to 127."""
    return float_of((exponent + 127) << 23)
