"""Shapes and dtypes of arrays, for what is traced and not computed."""

from __future__ import annotations

from typing import Any

import jax


def shapes_of(tree: Any) -> Any:
    """Return the shape and dtype of each array of a pytree, without its sharding, which may be of
    a user's mesh with explicit axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def shapes_on(tree: Any, shardings: Any) -> Any:
    """Return the shape and dtype of each array of a pytree, with its sharding in `shardings`: a
    pytree too, or a prefix of it."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        tree,
        jax.tree.broadcast(shardings, tree),
    )


def structure_of(tree: Any) -> Any:
    """Return what two pytrees have in common whose arrays are of the same shapes; hashable."""
    return jax.tree.structure(tree), tuple(x.shape for x in jax.tree.leaves(tree))
