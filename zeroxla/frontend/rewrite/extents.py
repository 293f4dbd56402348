"""The least and the greatest element of blocks that follow from positions, without computing them.

A causal mask compares positions of queries with those of keys. For a block of each it is all true,
all false, or mixed, and the positions' extents tell which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.frontend.rewrite.cut_dims import Window
from zeroxla.frontend.rewrite.recipe import BlockRoot, BlockStep, Recipe
from zeroxla.program import compat
from zeroxla.program.primitives import ELEMENTWISE, KEEPS_EXTENT
from zeroxla.program.trace import Constant

Extent = tuple[Any, Any] | None
"""(least, greatest element); None if they are not known."""


def extent(recipe: Recipe, number: int, window: Window) -> Extent:
    """Return the extent of an item's block.

    Args:
      recipe: the recipe.
      number: the item's number.
      window: by label, the first position and the number of positions.
    """
    known: dict[int, Extent] = {}
    for i in recipe.needs([number]):
        item = recipe.items[i]
        known[i] = None
        if isinstance(item, BlockStep):
            known[i] = _of_equation(item, [known[j] for j in item.args], window)
        elif isinstance(item, BlockRoot) and isinstance(item.operand, Constant):
            known[i] = _of_constant(item, item.operand.value, window)
    return known[number]


def _of_constant(item: BlockRoot, value: Any, window: Window) -> Extent:
    try:
        block = np.asarray(value)
    except TypeError:  # a random key
        return None
    for d, cut in enumerate(item.cuts):
        if cut is not None:
            first = window[cut.label][0] + cut.first
            block = np.take(block, range(first, first + window[cut.label][1]), axis=d)
    if not block.size or block.dtype.kind == "V":
        return None
    found = block.min(), block.max()
    return None if found[0] != found[0] else found


def _of_equation(item: BlockStep, args: list[Extent], window: Window) -> Extent:
    name, dtype = item.eq.name, np.dtype(item.eq.outputs[0].aval.dtype)
    is_bool = dtype.kind == "b"
    if name == "iota":
        d = item.eq.params["dimension"]
        cut, size = item.cuts[d], item.eq.outputs[0].aval.shape[d]
        first = 0
        if cut is not None:
            first, size = window[cut.label]
            first += cut.first
        return _as(dtype, first, first + size - 1)
    if name == "select_n" and len(args) == 3:
        which, of_false, of_true = args
        if which is not None and which[0] == which[1]:
            return of_true if which[0] else of_false
        if of_false is None or of_true is None:
            return None
        return min(of_false[0], of_true[0]), max(of_false[1], of_true[1])
    if name == "and" and is_bool and any(x is not None and not x[1] for x in args):
        return np.False_, np.False_
    if name == "or" and is_bool and any(x is not None and x[0] for x in args):
        return np.True_, np.True_
    if any(x is None for x in args):
        return None
    known = [x for x in args if x is not None]
    if name in KEEPS_EXTENT:
        return known[0]
    if name == "convert_element_type":
        low, high = known[0]
        if is_bool:
            return (np.bool_(low), np.bool_(low)) if low == high or low > 0 or high < 0 else None
        return _as(dtype, low, high)
    if name in _COMPARED:
        return _COMPARED[name](*known)
    if name in _COMPUTED and not is_bool:
        with np.errstate(all="ignore"):
            found = _COMPUTED[name](*known)
        return None if any(x != x for x in found) else found
    if name in ELEMENTWISE and not is_bool and all(x[0] == x[1] for x in known):
        return _of_numbers(item, [x[0] for x in known])
    if name == "not" and is_bool:
        return ~np.bool_(known[0][1]), ~np.bool_(known[0][0])
    if name in ("and", "or") and is_bool:
        of = np.logical_and if name == "and" else np.logical_or
        return of(known[0][0], known[1][0]), of(known[0][1], known[1][1])
    return None


def _of_numbers(item: BlockStep, numbers: list[Any]) -> Extent:
    """Return the extent of a function of numbers, which it is computed from."""
    primitive = item.eq.source.primitive
    with jax.ensure_compile_time_eval():
        bound = compat.bind_params(primitive, item.eq.params)
        found = np.asarray(primitive.bind(*map(jnp.asarray, numbers), **bound))[()]
    return None if found != found else (found, found)


def _as(dtype: Any, low: Any, high: Any) -> Extent:
    found = np.asarray(low).astype(dtype)[()], np.asarray(high).astype(dtype)[()]
    if np.dtype(dtype).kind in "iu" and (found[0] != low or found[1] != high):
        return None  # rounded or wrapped around
    return found


def _ordered(low: bool, high: bool) -> Extent:
    return np.bool_(low), np.bool_(high)


def _corners(of: Callable[[Any, Any], Any], a: tuple[Any, Any], b: tuple[Any, Any]) -> Extent:
    found = [of(x, y) for x in a for y in b]
    if any(x != x for x in found):
        return None
    return min(found), max(found)


def _swapped(of: Callable[[Any, Any], Extent]) -> Callable[[Any, Any], Extent]:
    return lambda a, b: of(b, a)


def _less(a: tuple[Any, Any], b: tuple[Any, Any]) -> Extent:
    return _ordered(a[1] < b[0], a[0] < b[1])


def _at_most(a: tuple[Any, Any], b: tuple[Any, Any]) -> Extent:
    return _ordered(a[1] <= b[0], a[0] <= b[1])


def _equal(a: tuple[Any, Any], b: tuple[Any, Any]) -> Extent:
    return _ordered(a[0] == a[1] == b[0] == b[1], a[0] <= b[1] and b[0] <= a[1])


def _unequal(a: tuple[Any, Any], b: tuple[Any, Any]) -> Extent:
    found = _equal(a, b)
    assert found is not None
    return ~found[1], ~found[0]


_COMPARED: Mapping[str, Callable[[Any, Any], Extent]] = {
    "lt": _less,
    "le": _at_most,
    "gt": _swapped(_less),
    "ge": _swapped(_at_most),
    "eq": _equal,
    "ne": _unequal,
}

_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": functools.partial(_corners, lambda x, y: x * y),
    "neg": lambda a: (-a[1], -a[0]),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
}
