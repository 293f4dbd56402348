"""Joins small arrays of any shape into one vector, so that they travel in one collective."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def as_vector(tree: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Return the arrays of a pytree end to end."""
    leaves = [jnp.ravel(x).astype(dtype) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves) if leaves else jnp.zeros((0,), dtype)


def from_vector(vector: jax.Array, like: Any) -> Any:
    """Cut a vector into arrays of the shapes of `like`."""
    leaves, tree = jax.tree.flatten(like)
    start, cut = 0, []
    for x in leaves:
        cut.append(vector[start : start + x.size].reshape(x.shape))
        start += x.size
    return tree.unflatten(cut)


def as_words(x: jax.Array) -> jax.Array:
    """Return integers, flags or PRNG keys as uint32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x.astype(jnp.uint32)


def from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """Undo `as_words`; return the array in the dtype of `like`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    return words.astype(like.dtype)
