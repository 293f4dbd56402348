"""`first_difference`: where two pytrees begin to differ, in words."""

from __future__ import annotations

from typing import Any

import jax

from zeroxla.program.paths import leaf_path

_MOST = 6  # names of parts that are printed


def first_difference(expected: Any, found: Any, path: tuple[Any, ...] = ()) -> str | None:
    """Return the first place at which the structures of two pytrees differ; None if they do not.

    Args:
      expected, found: the pytrees; their leaves are not compared.
      path: the keys that lead to them.

    >>> first_difference({"a": (1, 2)}, {"a": (1, 2, 3)})
    "at 'a' it needs (int, int) and has (int, int, int)"
    """
    if jax.tree.structure(expected) == jax.tree.structure(found):
        return None
    want, have = _parts(expected), _parts(found)
    if type(expected) is type(found) and (want.keys() == have.keys() or isinstance(found, dict)):
        for key in sorted(want.keys() | have.keys(), key=str):
            if key not in want or key not in have:
                known = want.get(key, have.get(key))
                words = f"needs {_name(known)} and has nothing"
                return f"at {leaf_path((*path, *key))!r} it " + (
                    words if key in want else f"needs nothing and has {_name(known)}"
                )
            if (deeper := first_difference(want[key], have[key], (*path, *key))) is not None:
                return deeper
    place = f"at {leaf_path(path)!r} it" if path else "it"
    return f"{place} needs {_words(expected)} and has {_words(found)}"


def _parts(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return the children of a pytree by their keys."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return {tuple(key): child for key, child in found}


def _words(tree: Any) -> str:
    """Return the type of a node; of a tuple, the types of its items."""
    if type(tree) is not tuple:
        return _name(tree)
    names = [_name(x) for x in tree[:_MOST]] + ["..."] * (len(tree) > _MOST)
    return f"({', '.join(names)})"


def _name(tree: Any) -> str:
    return "an array" if hasattr(tree, "shape") else type(tree).__name__
