"""Caches that a model's call takes as an argument: which argument it is, and who makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

MAKERS = ("init_cache", "make_cache", "empty_cache", "initialize_cache", "init_kv_cache")
"""Usual names of the method that returns an empty cache."""

_CACHE = {"cache", "caches", "past", "kv"}
_NOT_CACHE = {"init", "use", "return", "update", "index", "position", "positions", "size", "length"}


def is_cache(name: str) -> bool:
    """Return whether an argument of this name is a cache, such as `cache` or `past_key_values`."""
    words = set(name.lower().split("_"))
    return bool(words & _CACHE) and not words & _NOT_CACHE


def cache_name(signature: inspect.Signature) -> str | None:
    """Return the name of the argument that a call takes its cache by; None if there is none."""
    return next(filter(is_cache, signature.parameters), None)


def maker_of(kind: type) -> str | None:
    """Return the name of the method that makes the cache for a module's call.

    Args:
      kind: the module's class.
    """
    if cache_name(inspect.signature(kind.__call__)) is None:
        return None
    return next((name for name in MAKERS if callable(getattr(kind, name, None))), None)


def make_cache(method: Callable[..., Any], rows: int, places: int, dtype: Any) -> Any:
    """Call a method that makes an empty cache; its arguments are known by their names.

    Args:
      method: the bound method. Its arguments may be a number of rows (with "batch" or "rows" in its
        name), a number of places ("len", "size", "places"), both in one ("shape"), and a "dtype".
      rows, places, dtype: their values. A dtype of None leaves the method's own.

    Raises:
      TypeError: the method wants another argument.
    """
    given: dict[str, Any] = {}
    for name in inspect.signature(method).parameters:
        low = name.lower()
        if "dtype" in low:
            given |= {} if dtype is None else {name: dtype}
        elif "shape" in low:
            given[name] = (rows, places)
        elif any(word in low for word in ("batch", "bsz", "rows")):
            given[name] = rows
        elif any(word in low for word in ("len", "size", "places")):
            given[name] = places
    return method(**given)
