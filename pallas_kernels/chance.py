"""Random numbers from a seed and a position: the same on every backend, in whatever order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .floats import float_of

_ONE = 0x3F800000  # the bits of 1.0


def two_chances(seed: tuple[jax.Array, jax.Array], position: jax.Array) -> list[jax.Array]:
    """Return two float32 in (-1/2, 1/2) for each position. They are odd multiples of 2^-15.

    A code below 128 to which such a number is added is still rounded to that code, even if the code
    itself was computed with the error of two roundings.

    Args:
      seed: two int32 scalars.
      position: int32, of any shape.

    Source: the constants and shifts of MurmurHash3's finalizer (public domain), after a step of the
      golden ratio.
    """
    x = position * _constant(0x9E3779B9) + seed[0]
    x = (x ^ _down(x, 16)) * _constant(0x85EBCA6B)
    x = (x ^ _down(x, 13) ^ seed[1]) * _constant(0xC2B2AE35)
    x = x ^ _down(x, 16)
    # 14 bits of the word become the upper bits of a number in [1, 2).
    words = [_down(x, 9), lax.shift_left(x, jnp.int32(7))]
    return [float_of((word & 0x7FFE00) | (_ONE | 0x100)) - 1.5 for word in words]


def _down(x: jax.Array, bits: int) -> jax.Array:
    return lax.shift_right_logical(x, jnp.int32(bits))


def _constant(x: int) -> np.int32:
    return np.uint32(x).view(np.int32)
