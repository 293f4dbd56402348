"""A plain pair of functions: `init(key, batch) -> params`, `loss(params, batch, key)`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.base import Adapted, Containers, Tree, check_signature, checked, to_nested
from zeroxla.program.paths import Path, paths_of


def adapt_function(init: Callable[..., Any], loss: Callable[..., Any]) -> Adapted:
    """Adapt a pair; see `adapt`.

    The params may be any pytree. List items and attributes become string keys of nested dicts, and
    a bare array gets the key "param". Before the loss sees the params, they are put back into their
    own pytree, whose structure is known from one abstract evaluation of `init`.

    Raises:
      ValueError: a function has another signature, or the paths of two leaves read the same.
    """
    check_signature(init, "init", "init(key, batch)", 2)
    check_signature(loss, "loss", "loss(params, batch, key)", 3)
    known: list[Containers] = []
    are_plain: list[bool] = []

    def note(params: Any) -> list[Path]:
        paths = names_of(params)
        known[:] = [Containers(paths=tuple(paths), tree=jax.tree.structure(params))]
        are_plain[:] = [_is_plain(params)]
        return paths

    def init_function(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        params = init(key, batch)
        leaves, _ = jax.tree.flatten(params)
        paths = note(params)
        return to_nested(dict(zip(paths, map(jnp.asarray, leaves), strict=True))), {}

    def loss_function(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], Tree]:
        del train  # A plain loss has no eval mode.
        if not known:
            note(jax.eval_shape(init, key, batch))
        return *checked(loss(known[0].filled(params), batch, key)), model_state

    return Adapted(
        init=init_function,
        loss=loss_function,
        containers=lambda: known[0] if known and all(are_plain) else None,
    )


def _is_plain(params: Any) -> bool:
    """Return whether a tree is made of dicts, lists and tuples alone.

    Modules of other libraries hold more than parameters, so theirs are shown as nested dicts.
    """
    if isinstance(params, Mapping):
        return all(map(_is_plain, params.values()))
    if isinstance(params, list | tuple):
        return all(map(_is_plain, params))
    return jax.tree_util.all_leaves([params]) or params is None


def names_of(params: Any) -> list[Path]:
    """Return the path of each leaf; a bare array has the path "param"."""
    paths = [path or ("param",) for path, _ in paths_of(params)]
    if len(set(paths)) != len(paths):
        twice = sorted({"/".join(path) for path in paths if paths.count(path) > 1})
        raise ValueError(
            f"two parameters have the same path as text: {', '.join(twice)}; rename a dict key"
        )
    return paths
