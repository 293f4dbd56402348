"""Caches of flax.nnx modules: `nnx.Cache` variables, or an argument of the call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zeroxla.frontend.base import Caching, Tree, empty_like, to_flat, to_nested
from zeroxla.frontend.cache_argument import make_cache, maker_of
from zeroxla.frontend.nnx_variables import text, variables_of
from zeroxla.program.paths import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheKind:
    """What a module's class says about its cache.

    Attributes:
      maker: the method that returns an empty cache for an argument of the call; None if the call
        takes none.
      variables: whether `nnx.Cache` variables can be made.
      using: the arguments of each call with these variables.
    """

    maker: str | None
    variables: bool
    using: dict[str, bool]


def cache_kind(module: nnx.Module) -> CacheKind:
    """Return which cache a module has."""
    flags = inspect.signature(type(module).__call__).parameters
    return CacheKind(
        maker=maker_of(type(module)),
        variables=hasattr(module, "init_cache") or bool(attentions(module)),
        using={"decode": True} if "decode" in flags else {},
    )


def attentions(module: nnx.Module) -> list[nnx.MultiHeadAttention]:
    """Return Flax's own attention layers of a module, which keep a cache each."""
    parts = (part for _, part in nnx.iter_modules(module, graph=True))
    return [part for part in parts if isinstance(part, nnx.MultiHeadAttention)]


def nnx_caches(
    init: Callable[..., tuple[Tree, Tree]], in_eval: Callable[[Tree, Tree], Any], kind: CacheKind
) -> dict[str, Any]:
    """Return the attributes `caching` and `make_cache` of an `Adapted`, as far as there are any.

    Args:
      init: the attribute of `Adapted`.
      in_eval: (params, model_state) -> module.
      kind: which cache the module has.
    """
    if kind.maker is not None:
        maker = kind.maker

        def make(rows: int, places: int, dtype: Any) -> Any:
            shapes = jax.eval_shape(partial(init, jax.random.key(0)), None)
            module = in_eval(*jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
            return make_cache(getattr(module, maker), rows, places, dtype)

        return {"make_cache": make}
    return {"caching": nnx_caching(init, in_eval, kind.using)} if kind.variables else {}


def nnx_caching(
    init: Callable[..., tuple[Tree, Tree]],
    in_eval: Callable[[Tree, Tree], Any],
    using: dict[str, bool],
) -> Caching:
    """Return the cached calls of a module that has `nnx.Cache` variables, which each call advances.

    The module makes them in its method `init_cache(shape, dtype)`, for a shape (rows, places).
    Without such a method its `nnx.MultiHeadAttention` layers make them; these layers get
    `decode=True`.

    Args:
      init: the attribute of `Adapted`.
      in_eval: (params, model_state) -> module.
      using: the arguments of each call with a cache.
    """

    def cache_of(module: nnx.Module) -> dict[Path, Any]:
        return {text(path): variable for path, variable in variables_of(module, nnx.Cache)}

    def values(module: nnx.Module) -> Tree:
        return to_nested({path: x.get_raw_value() for path, x in cache_of(module).items()})

    def with_cache(module: Any, rows: int, places: int, dtype: Any) -> Any:
        own = getattr(module, "init_cache", None)
        if own is not None:
            own((rows, places), dtype)
        for layer in attentions(module):
            layer.decode = True
            if own is None:
                layer.init_cache((rows, places, layer.in_features), dtype)
        return module

    def empty(rows: int, places: int, dtype: Any, use: Callable[[Any], Any]) -> Tree:
        del use

        def make() -> Tree:
            module = in_eval(*init(jax.random.key(0), None))
            kind = jnp.float32 if dtype is None else dtype
            return values(with_cache(module, rows, places, kind))

        return jax.tree.map(lambda x: empty_like(x, dtype), jax.eval_shape(make))

    def apply(
        params: Tree, model_state: Tree, cache: Tree, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tree]:
        # This makes the variables; their values come next.
        module = with_cache(in_eval(params, model_state), 1, 1, jnp.float32)
        leaves = to_flat(cache)
        for path, variable in cache_of(module).items():
            variable.set_raw_value(leaves[path])
        result = module(*args, **{**using, **kwargs})
        return result, values(module)

    return Caching(empty=empty, apply=apply)
