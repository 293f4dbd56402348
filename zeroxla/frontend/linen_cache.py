"""Caches of flax.linen modules: the collection "cache", or an argument of the call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze

from zeroxla.frontend.base import Caching, Tree, empty_like
from zeroxla.frontend.cache_argument import make_cache, maker_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """How a module is told to keep a cache in the collection "cache".

    Attributes:
      module: returns the module with its own switch on; it is copied then, not before.
      making: the arguments of the call that makes the cache.
      using: the arguments of each call with the cache.
    """

    module: Callable[[], nn.Module]
    making: dict[str, bool]
    using: dict[str, bool]


def linen_caches(module: nn.Module) -> dict[str, Any]:
    """Return the attributes `caching` and `make_cache` of an `Adapted`, as far as there are any."""
    maker = maker_of(type(module))
    if maker is not None:
        return {"make_cache": partial(make_cache, getattr(module, maker))}
    switch = switch_of(module)
    return {} if switch is None else {"caching": linen_caching(switch)}


def switch_of(module: nn.Module) -> Switch | None:
    """Return how a module is told to keep a cache; None if it has no such switch.

    It may be a field `decode` of the module (flax's convention) or of its `config`; or a flag of
    its call: `init_cache` (the convention of transformers), which only the call that makes the
    cache gets, or `decode`, which each call with the cache gets. Autoencoders have a method or a
    submodule of the name `decode`, which switches no cache on.
    """
    if has_field(module, "decode"):
        return Switch(module=lambda: module.clone(decode=True), making={}, using={})
    flags = inspect.signature(type(module).__call__).parameters
    if "init_cache" in flags:
        return Switch(module=lambda: module, making={"init_cache": True}, using={})
    config: Any = getattr(module, "config", None)
    if has_field(config, "decode"):
        decoding = partial(dataclasses.replace, config, decode=True)
        return Switch(module=lambda: module.clone(config=decoding()), making={}, using={})
    if "decode" in flags:
        return Switch(module=lambda: module, making={"decode": True}, using={"decode": True})
    return None


def has_field(owner: Any, name: str) -> bool:
    """Return whether a dataclass has a field of this name whose value cannot be called."""
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return False
    fields = {field.name for field in dataclasses.fields(owner)}
    return name in fields and not callable(getattr(owner, name, None))


def linen_caching(switch: Switch) -> Caching:
    """Return the cached calls of a module that has a switch.

    The module makes the collection "cache" when it is initialised on tokens of the cache's full
    shape. It advances the cache in every call, as `nn.MultiHeadDotProductAttention` does.
    """

    def empty(rows: int, places: int, dtype: Any, use: Callable[[Any], Any]) -> Tree:
        del rows, places  # `use` has them.

        def run(module: nn.Module) -> None:
            use(partial(module, **switch.making))

        variables = jax.eval_shape(nn.init(run, switch.module()), jax.random.key(0))
        cache = nn.meta.unbox(unfreeze(variables).get("cache", {}))
        return jax.tree.map(lambda x: empty_like(x, dtype), cache)

    def apply(
        params: Tree, model_state: Tree, cache: Tree, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tree]:
        variables = {"params": params, **model_state, "cache": cache}
        result, changed = switch.module().apply(
            variables, *args, mutable=["cache"], **switch.using, **kwargs
        )
        return result, unfreeze(changed)["cache"]

    return Caching(empty=empty, apply=apply)
