"""Paths of a tree's leaves, as text."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import jax

Path = tuple[str, ...]
"""The keys on the way from a tree's root to a leaf."""


def paths_of(tree: Any) -> list[tuple[Path, Any]]:
    """Return a tree's leaves with their paths, in the tree's order.

    >>> paths_of({"h": [1, {"kernel": 2}]})
    [(('h', '0'), 1), (('h', '1', 'kernel'), 2)]
    """
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), x) for path, x in found
    ]


def leaf_path(path: tuple[Any, ...]) -> str:
    """Return a leaf's name, such as `a/b/c`, from the key path that `jax.tree_util` gives."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def short_line(line: str) -> str:
    """Return a line of a file as "folder/file.py:line".

    >>> short_line("/home/me/models/gpt.py:12")
    'models/gpt.py:12'
    """
    return "/".join(PurePath(line).parts[-2:])
