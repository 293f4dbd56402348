"""The Hadamard rotation of neighbouring elements, SIZE at a time, after a fixed change of signs.

Neighbours are often alike, and would add up to one large element and many small ones. So some of
them change their signs first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SIZE = 32
# H H = 32, so H, then H x BACK is the identity. BACK is a power of two: products are exact.
BACK = 1 / 32


def change_sign(place: Any) -> Any:
    """Return 1 for the elements of a group that change their sign, and 0 for the others.

    It is a quadratic form, of rank 4, of the bits of an element's place. Without it, 32 equal
    elements would become one that is 32 times as large. With it they become 16 that are 8 times as
    large. The same holds for elements that have the signs of any other column of H.
    """
    bits = [place >> i & 1 for i in range(5)]
    return bits[0] & bits[1] ^ bits[2] & bits[3] ^ bits[4]


STRIDES = (16, 8, 4, 2, 1)
"""The distances of the pairs that are added and subtracted, in this order on every backend."""


def rotate(x: jax.Array) -> jax.Array:
    """Change signs, and multiply groups of SIZE neighbours by H: float32[T, length].

    The length is a multiple of SIZE.

    Cost: 5 additions for each element.
    """
    groups = x.reshape(-1, SIZE)
    return lax.optimization_barrier(_hadamard(groups * _signs())).reshape(x.shape)


def rotate_back(x: jax.Array) -> jax.Array:
    """Undo `rotate`, up to the rounding of sums."""
    # Else XLA decodes an element once for each sum that it is in.
    groups = lax.optimization_barrier(x).reshape(-1, SIZE)
    groups = _hadamard(groups) * (_signs() * np.float32(BACK))
    return lax.optimization_barrier(groups).reshape(x.shape)


def _signs() -> jax.Array:
    """Return the signs of a group. They are computed, because no kernel takes a constant array."""
    return (1 - 2 * change_sign(jnp.arange(SIZE))).astype(jnp.float32)


def _hadamard(x: jax.Array) -> jax.Array:
    """Return [N, SIZE] times H.

    XLA makes two loops of it, for strides from 4 on, where 4 neighbours are one vector, and within
    such vectors. Each element is summed by itself, in the order of the stages, and not together
    with its group. That is more sums in fewer passes over memory, and several times as fast.
    """
    x = lax.optimization_barrier(_stages(x.reshape(-1, 8, 4)))
    return _stages(x.reshape(-1, 4, 1)).reshape(-1, SIZE)


def _stages(x: jax.Array) -> jax.Array:
    """Return the Hadamard transform of [N, M, C] along M, which is a power of two."""
    size = x.shape[1]
    parts = [x[:, i : i + 1] for i in range(size)]
    stride = size // 2
    while stride:
        minus = jnp.arange(size) & stride != 0
        signs = jnp.where(minus, jnp.float32(-1), jnp.float32(1))[:, None]
        parts = [a + b * signs for a, b in zip(parts[:stride], parts[stride:], strict=True)]
        stride //= 2
    return parts[0]
