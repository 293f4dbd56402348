"""Turns weights as users have them into arrays by path: variables of linen, modules and states of
nnx, nested dicts, any pytree, or functions that return arrays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax

from zeroxla.frontend.base import to_flat
from zeroxla.frontend.complex_leaves import split_complex
from zeroxla.frontend.function import names_of
from zeroxla.frontend.linen_collections import (
    INTERMEDIATES,
    PERTURBATIONS,
    holds_arrays,
)
from zeroxla.program.paths import Path

Shape = tuple[int, ...]


def arrays_by_path(
    given: Any,
    shapes: Mapping[Path, Shape],
    state_paths: Collection[Path],
    is_sown: Callable[[Path], bool] = lambda path: False,
) -> tuple[dict[Path, Any], dict[Path, Any]]:
    """Return the parameters and the model state in `given`, by path, without reading them.

    Paths that the model does not have come with the parameters, as they are.

    Args:
      given: a linen `variables` dict, an nnx module or state, a nested or flat dict (names such as
        "a/b" or "a.b", or tuples), any other pytree, or a function of a name and a shape. Leaves
        may be functions without arguments.
      shapes: the natural shapes of the model's parameters.
      state_paths: the paths of the model state.
      is_sown: see `Adapted.sown`.

    Raises:
      ValueError: it holds no arrays, such as a linen module, or two of its paths read the same.
    """
    if isinstance(given, type | nn.Module):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise ValueError(
            f"{name} holds no arrays; give its variables, as module.init(key, ...) returns them"
        )
    if callable(given) and jax.tree_util.all_leaves([given]) and not _is_nnx(given):
        return {
            path: functools.partial(given, "/".join(path), shape) for path, shape in shapes.items()
        }, {}
    found = (
        _flat_variables(given, shapes, is_sown)
        if isinstance(given, Mapping)
        else flat_arrays(given)
    )
    known = {_joined(path): path for path in shapes}
    params, model_state = {}, {}
    for path, x in found.items():
        if path in state_paths and path not in shapes:
            model_state[path] = x
            continue
        own = path if path in shapes else known.get(_joined(path), path)
        is_twice = own in params or (own != path and own in found)
        params[path if is_twice else own] = x
    split = {path: to_flat({"": split_complex(x)}) for path, x in params.items()}
    params = {(*path, *part[1:]): x for path, parts in split.items() for part, x in parts.items()}
    return params, model_state


def flat_arrays(given: Any) -> dict[Path, Any]:
    """Return the leaves of a tree by path; boxes and variables are opened.

    Rng streams of nnx are left out.

    Raises:
      ValueError: two paths read the same.
    """
    if _is_nnx(given):
        from zeroxla.frontend.nnx_variables import (
            arrays_of,
        )  # here for the time that it takes to import

        return {path: nn.meta.unbox(x) for path, x in arrays_of(given).items()}
    tree = jax.tree.map(
        lambda x: x.get_raw_value() if _is_variable(x) else x, given, is_leaf=_is_variable
    )
    tree = nn.meta.unbox(tree)
    return dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True))


def _flat_variables(
    given: Mapping[Any, Any], shapes: Mapping[Path, Shape], is_sown: Callable[[Path], bool]
) -> dict[Path, Any]:
    """Return the leaves of a dict by path. Those of linen variables come without the name of the
    collection "params", and without the outputs of `sow`."""
    params = given.get("params")
    has_own = any(path[0] == "params" for path in shapes)  # a module of this name
    if isinstance(params, Mapping) and (not has_own or "params" in params):
        no_state = ("params", INTERMEDIATES, PERTURBATIONS)
        others = {n: c for n, c in given.items() if n not in no_state}
        state = {
            p: x
            for p, x in flat_arrays(others).items()
            if (callable(x) or holds_arrays(x)) and not is_sown(p)
        }
        return flat_arrays(params) | state
    if given and all(isinstance(name, tuple) for name in given):
        return {tuple(map(str, path)): x for path, x in given.items()}
    return flat_arrays(given)


def _joined(path: Path) -> str:
    """Return a path as one name, the same for "a/b", "a.b" and ("a", "b")."""
    return "/".join(path).replace(".", "/")


def _is_nnx(given: Any) -> bool:
    """Return whether `given` is a module or a state of nnx, without importing nnx."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(given, nnx.Module | nnx.State)


def _is_variable(x: Any) -> bool:
    return hasattr(x, "get_raw_value")
