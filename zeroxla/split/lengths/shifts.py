"""Arrays whose elements move along a dim, made of equations that can be split along it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def one_of(array: jax.Array, d: int, i: int) -> jax.Array:
    """Return one element along a dim, which stays a dim: a sum in which the others are zeros."""
    found = jnp.where(places(array, d) == i, array, jnp.zeros_like(array)).sum(d, keepdims=True)
    return found.astype(array.dtype)


def shifted(array: jax.Array, d: int, by: int, fill: jax.Array | None) -> jax.Array:
    """Return an array moved along a dim; where nothing came, its own values or `fill`."""
    if by == 0:
        return array
    configs = [(by, -by, 0) if i == d else (0, 0, 0) for i in range(array.ndim)]
    given = jnp.zeros((), array.dtype) if fill is None else jnp.asarray(fill, array.dtype)
    moved = lax.pad(array, given, configs)
    if fill is not None and by > 0:
        return moved
    at = places(array, d)
    came = at >= by if by > 0 else at < array.shape[d] + by
    return jnp.where(came, moved, array)


def each(array: jax.Array, d: int, stride: int, first: int) -> jax.Array:
    """Return each `stride`-th element along a dim, whose size it divides, from one on."""
    shape = array.shape
    apart = array.reshape(*shape[:d], shape[d] // stride, stride, *shape[d + 1 :])
    return lax.index_in_dim(apart, first, axis=d + 1, keepdims=False)


def spread(array: jax.Array, d: int, stride: int, first: int, fill: jax.Array | float) -> jax.Array:
    """Return an array with `stride - 1` elements more around each element of a sequence."""
    shape = array.shape
    apart = (*shape[: d + 1], stride, *shape[d + 1 :])
    many = lax.broadcast_in_dim(array, apart, [i for i in range(len(apart)) if i != d + 1])
    here = lax.broadcasted_iota(jnp.int32, apart, d + 1) == first
    found = jnp.where(here, many, jnp.asarray(fill, array.dtype))
    return found.reshape(*shape[:d], shape[d] * stride, *shape[d + 1 :])


def places(array: jax.Array, d: int) -> jax.Array:
    """Return the places along a dim, to be compared with: [1, .., n, .., 1]."""
    n = array.shape[d]
    shape = [n if i == d else 1 for i in range(array.ndim)]
    return lax.broadcasted_iota(jnp.int32, shape, d)
