"""Shapes and dtypes of arrays, for functions that are traced without being computed."""

from __future__ import annotations

from typing import Any

import jax


def shapes_of(tree: Any) -> Any:
    """Return the shape and dtype of each array of a pytree.

    Shardings are left out: an array of the user's may be on a mesh with explicit axes.
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def shapes_on(tree: Any, shardings: Any) -> Any:
    """Return the shape, dtype and sharding of each array of a pytree.

    Args:
      tree: a pytree of arrays or shapes.
      shardings: a pytree of shardings, with the structure of `tree` or a prefix of it.
    """
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        tree,
        jax.tree.broadcast(shardings, tree),
    )


def structure_of(tree: Any) -> Any:
    """Return a hashable value that is equal for trees of the same structure and array shapes."""
    return jax.tree.structure(tree), tuple(x.shape for x in jax.tree.leaves(tree))
