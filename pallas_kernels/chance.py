"""Random numbers from a seed and a position: the same on every backend, in whatever order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def uniform(seed: tuple[jax.Array, jax.Array], position: jax.Array) -> jax.Array:
    """Return a float32 in (0, 1) for each position. It is an odd multiple of 2^-24.

    Args:
      seed: two int32 scalars.
      position: int32, of any shape.

    Source: the finalizer of MurmurHash3 (public domain), run once with each half of the seed.
    """
    x = _mixed(_mixed(position ^ seed[0]) ^ seed[1])
    x = lax.shift_right_logical(x, jnp.int32(8)) | 1
    return x.astype(jnp.float32) * np.float32(2.0**-24)


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of int32 numbers: the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        x = x ^ lax.shift_right_logical(x, jnp.int32(shift))
        if factor is not None:
            x = x * np.uint32(factor).view(np.int32)
    return x
