"""Codes and their values in Triton: the lines of arithmetic.py, floats.py and chance.py once more.

Triton compiles the text of functions, so it cannot call those of JAX. A test holds every kernel
against the XLA reference, bit for bit. Products and sums are not fused: `shim.triton_call` says so
to the compiler.

    T        number of blocks, one in each row
    C        number of elements in one piece of a block, and padding up to a power of two
    rule     an arithmetic.Rule, known when a kernel is compiled
    half     number of negative codes
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDER = tl.constexpr(1.5 * 2**23)
_MANTISSA = tl.constexpr(0x7FFFFF)
_HIDDEN_BIT = tl.constexpr(0x800000)
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0


@triton.jit
def bits_of(x):
    """View float32 numbers as int32 bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """View int32 bits as float32 numbers."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def down(bits, count):
    """Shift int32 right by `count`, with zeros from the left."""
    return (bits.to(tl.uint32, bitcast=True) >> count).to(tl.int32, bitcast=True)


@triton.jit
def nearest(x):
    """Round |x| <= 2^22 to the nearest whole numbers, to even on ties, as float32."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def truncated(x):
    """Cut x off to 16 significant bits."""
    return float_of(bits_of(x) & -0x100)


@triton.jit
def rounded_up(x, short: tl.constexpr):
    """Round a positive x up to 16 significant bits; with `short`, to the 8 bits of a bfloat16."""
    dropped: tl.constexpr = 0xFFFF if short else 0xFF
    return float_of((bits_of(x) + dropped) & -(dropped + 1))


@triton.jit
def shortened(x):
    """Return a finite x rounded to the nearest bfloat16, to even on ties, as float32."""
    bits = bits_of(x)
    return float_of((bits + 0x7FFF + (down(bits, 16) & 1)) & -0x10000)


@triton.jit
def inverse_of(x):
    """Return 1 / x within 2^-22 of it, x from 2^-98 to 2^122."""
    y = float_of(0x7EF311C3 - bits_of(x))
    for _ in tl.static_range(3):
        y = y * (2.0 - tl.minimum(x * y, 2.0))
    return y


@triton.jit
def reciprocal(x, scale_log2: tl.constexpr):
    """Return 2^scale_log2 / x, rounded to the nearest float32. Both are positive and normal."""
    bits = bits_of(x)
    mantissa = (bits & _MANTISSA) | _HIDDEN_BIT
    unit = float_of((bits & _MANTISSA) | _ONE)
    quotient = ((1.0 / unit) * 16777216.0).to(tl.int32)
    rest = -(quotient * mantissa)
    for _ in tl.static_range(3):
        more = tl.where(2 * rest > mantissa, 1, 0) - tl.where(2 * rest < -mantissa, 1, 0)
        quotient = quotient + more
        rest = rest - more * mantissa
    exponent = (127 + scale_log2 - 24) - down(bits, 23)
    return float_of(bits_of(quotient.to(tl.float32)) + exponent * _HIDDEN_BIT)


@triton.jit
def chance_of(seed_ptr, position, upper: tl.constexpr):
    """Return a float32 in (-1/2, 1/2) for each position: the first of `chance.two_chances`, or the
    second one.

    Args:
      seed_ptr: of int32[2].
      position: int32, of any shape.
      upper: whether to return the second.
    """
    first = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(seed_ptr + 1).to(tl.uint32, bitcast=True)
    x = position.to(tl.uint32, bitcast=True) * 0x9E3779B9 + first
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ second) * 0xC2B2AE35
    x = x ^ (x >> 16)
    word = x << 7 if upper else x >> 9
    return ((word & 0x7FFE00) | 0x3F800100).to(tl.float32, bitcast=True) - 1.5


@triton.jit
def code_of(byte, bits: tl.constexpr, upper: tl.constexpr):
    """Return the codes in bytes, as float32[T, C].

    Args:
      byte: uint8[T, C].
      bits: of a code.
      upper: whether to return the code in the upper 4 bits instead of the lower one.
    """
    word = byte.to(tl.int32)
    # Bits are put behind the upper ones of 2^23, and the sign of a code is turned over, at once.
    if bits == 8:
        return float_of(word ^ 0x4B000080) - 8388736.0
    word = word >> 4 if upper else word & 15
    return float_of(word ^ 0x4B000008) - 8388616.0


@triton.jit
def encode(x, grid, rule: tl.constexpr, chance):
    """Return codes in the lowest 8 bits of int32[T, C]; the others are undefined.

    Args:
      x: float32[T, C].
      grid: (step, inverse, offset, finite) of each block, [T] each, as triton_scales.py says.
      rule: the rule of the grid.
      chance: float32[T, C] in (-1/2, 1/2); only read with stochastic rounding.
    """
    _, inverse, offset, _ = grid
    if not rule.symmetric:
        x = x - offset[:, None]
    code = tl.minimum(x * inverse[:, None], rule.half - 1.0)
    if not (rule.symmetric and rule.scale == "bound"):
        code = tl.maximum(code, -1.0 * rule.half)
    if rule.stochastic:
        code = code + chance
    return bits_of(code + _ROUNDER)


@triton.jit
def decode(code, step, offset, rule: tl.constexpr):
    """Return the values of whole numbers `code`, float32[T, C].

    Args:
      code: float32[T, C].
      step: float32[T].
      offset: float32[T]; only read if the rule has offsets.
      rule: the rule that made the step.
    """
    if rule.exact:
        value = code * step[:, None]
    else:
        leading = truncated(step)
        value = code * leading[:, None] + code * (step - leading)[:, None]
    if not rule.symmetric:
        value = value + offset[:, None]
    return value
