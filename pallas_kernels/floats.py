"""Arithmetic on the bits of float32 numbers, so that every compiler gives the same result.

A maximum of integers depends on no order and hides no NaN. A rounding that is written in bits
cannot be optimized away. Division is written out because NVIDIA GPUs only approximate it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAGNITUDE = 0x7FFFFFFF
SIGN = -0x80000000
NAN = 0x7FC00000

_MANTISSA = 0x7FFFFF
_HIDDEN_BIT = 0x800000
_ONE = 0x3F800000


def bits_of(x: jax.Array) -> jax.Array:
    """View float32 numbers as int32 bits."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """View int32 bits as float32 numbers."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def ordered(bits: jax.Array) -> jax.Array:
    """Change the bits of floats so that they compare as integers as the floats do.

    -0 is below +0, and NaNs lie beyond the infinities of their sign. The function is its own
    inverse.
    """
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & MAGNITUDE)


def above(x: float) -> np.float32:
    """Return a float32 that is 3 to 4 roundings above x. Its product with a float32 y is never
    below x times y, even if y was rounded twice."""
    return np.float32(x * (1 + 2.0**-22))


def truncated(x: jax.Array) -> jax.Array:
    """Cut x off to 16 significant bits, so that its product with an 8-bit integer is exact."""
    return float_of(bits_of(x) & ~0xFF)


def rounded_up(x: jax.Array, *, short: bool) -> jax.Array:
    """Round a positive x up to 16 significant bits; with `short`, to the 8 bits of a bfloat16."""
    dropped = 0xFFFF if short else 0xFF
    return float_of((bits_of(x) + dropped) & ~dropped)


def shortened(x: jax.Array) -> jax.Array:
    """Return a finite x rounded to the nearest bfloat16, to even on ties, as float32."""
    bits = bits_of(x)
    odd = lax.shift_right_logical(bits, jnp.int32(16)) & 1
    return float_of((bits + 0x7FFF + odd) & ~0xFFFF)


def inverse_of(x: jax.Array) -> jax.Array:
    """Return 1 / x within 2^-22 of it, by multiplications that every machine rounds alike.

    Args:
      x: float32 from 2^-98 to 2^122.
    """
    # Newton's method begins with an error of 5 %, and squares it three times. No 2 - product is
    # below 0, and the clamp keeps a compiler from fusing the product with the difference.
    y = float_of(0x7EF311C3 - bits_of(x))
    for _ in range(3):
        y = y * (2.0 - jnp.minimum(x * y, 2.0))
    return y


def reciprocal(x: jax.Array, scale_log2: int = 0) -> jax.Array:
    """Return 2^scale_log2 / x, rounded to the nearest float32 whatever the machine's division does.

    Args:
      x: float32, positive and normal. The result must be normal too.
      scale_log2: the exponent of the numerator.
    """
    bits = bits_of(x)
    mantissa = (bits & _MANTISSA) | _HIDDEN_BIT  # x as an integer of 24 bits
    unit = float_of((bits & _MANTISSA) | _ONE)  # x scaled into [1, 2)
    quotient = ((1.0 / unit) * np.float32(2.0**24)).astype(jnp.int32)  # 2^47 / mantissa, nearly
    # 2^47 is 0 modulo 2^32, and the remainder is small: 32 bits hold it exactly.
    rest = -(quotient * mantissa)
    for _ in range(3):  # the quotient is off by 2 units in the last place, and was then cut off
        more = jnp.where(2 * rest > mantissa, 1, 0) - jnp.where(2 * rest < -mantissa, 1, 0)
        quotient, rest = quotient + more, rest - more * mantissa
    exponent = (127 + scale_log2 - 24) - lax.shift_right_logical(bits, jnp.int32(23))
    return float_of(bits_of(quotient.astype(jnp.float32)) + exponent * _HIDDEN_BIT)
