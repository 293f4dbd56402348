"""Where a leaf is in its tree: the path of its keys, as text."""

from __future__ import annotations

from typing import Any

import jax

Path = tuple[str, ...]


def paths_of(tree: Any) -> list[tuple[Path, Any]]:
    """Return a tree's leaves with their paths, in its order.

    >>> paths_of({"h": [1, {"kernel": 2}]})
    [(('h', '0'), 1), (('h', '1', 'kernel'), 2)]
    """
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), x) for path, x in found
    ]


def leaf_path(path: tuple[Any, ...]) -> str:
    """Return a leaf's name, `a/b/c`, from its key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
