"""Calls a language model: tokens go in, logits come out, with or without a cache.

Shape letters: B rows, L tokens, M places of the cache, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree
from zeroxla.hybrid.from_trace.cache import TracedCache
from zeroxla.hybrid.from_trace.places import ForbiddenError
from zeroxla.hybrid.named_call import Call

MakeCache = Callable[[int, int, Any], Any]
"""`make_cache(rows, places, dtype) -> cache`, any pytree of arrays."""

OWN = "own"
"""The dtype of a cache that keeps the dtypes that the module gives it."""


class NoLogitsError(ValueError):
    """A model's call returned no array of the shape of logits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheCall:
    """How a model is called with a cache.

    Attributes:
      call: calls it.
      make: makes an empty cache for an argument of the call. None: the module has variables.
      dtype: the dtype of floating arrays in the cache; `OWN` keeps the module's.
      rows: "padded" if prompts of different lengths can be padded on the left, since the call reads
        positions and a mask. "aligned" if all rows must begin at the cache's first place.
      one_token: whether the cache takes one token a call.
      traced: the cache that is made from the trace of whole rows; None if the model has its own.
    """

    call: Call
    make: MakeCache | None
    dtype: Any
    rows: Literal["padded", "aligned"] = "padded"
    one_token: bool = False
    traced: TracedCache | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCalls:
    """Calls a model that takes tokens int32[B, L] and returns logits [B, L, V].

    Attributes:
      adapted: the model.
      call: calls it on whole rows.
      fresh_cache: makes the empty cache that the call on whole rows needs, too; None if it needs
        none.
      with_cache: how it is called with a cache; None if it has none.
      no_cache: the reason why it has none.
    """

    adapted: Adapted
    call: Call
    fresh_cache: MakeCache | None = None
    with_cache: CacheCall | None = None
    no_cache: str = ""

    @property
    def has_cache(self) -> bool:
        """Whether tokens are generated with a cache."""
        return self.with_cache is not None

    def shortcomings(self) -> list[str]:
        """Return warnings about calls that are slower than a user would expect."""
        if self.has_cache:
            return []
        return [f"{self.no_cache}: each new token takes a pass over the whole sequence"]

    def forward(self, params: Tree, model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the float32 logits [B, L, V] of whole rows."""
        assert self.adapted.bound is not None
        rows, length = tokens_BL.shape
        make = self.fresh_cache
        result = self.call(
            self.adapted.bound(params, model_state),
            tokens_BL,
            positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)),
            mask=jnp.ones((rows, length), jnp.int32),
            cache=None if make is None else make(rows, length, None),
        )
        return logits_of(result, tokens_BL.shape)

    def with_traced(self, params: Tree, model_state: Tree, rows: int, places: int) -> ModelCalls:
        """Return the calls with a cache that is made from the trace, instead of the model's own.

        Args:
          params, model_state: the shapes of the model's leaves and its other collections.
          rows, places: the shape of rows to try it on.

        Returns:
          The calls without a cache, if none can be made; `no_cache` then says why.
        """
        without = dataclasses.replace(self, with_cache=None)
        traced = TracedCache(forward=without.forward)
        try:
            traced.plan(params, model_state, rows, places)
        except ForbiddenError as error:
            why = f"{self.no_cache}, and none can be made from its trace ({error})"
            return dataclasses.replace(without, no_cache=why)
        how = CacheCall(
            call=self.call, make=None, dtype=None, rows="aligned", one_token=True, traced=traced
        )
        return dataclasses.replace(self, with_cache=how)

    def empty_cache(
        self, params: Tree, model_state: Tree, rows: int, places: int, dtype: Any
    ) -> Any:
        """Return an empty cache.

        Args:
          params, model_state: the shapes of the model's leaves and its other collections.
          rows, places: the number of rows, and of places in each.
          dtype: the dtype of floating arrays in it.
        """
        how = self.with_cache
        assert how is not None
        if how.traced is not None:
            return how.traced.empty(params, model_state, rows, places, dtype)
        dtype = None if how.dtype == OWN else dtype
        if how.make is not None:
            return jax.tree.map(jnp.asarray, how.make(rows, places, dtype))
        assert self.adapted.caching is not None

        def use(model: Callable[..., Any]) -> Any:
            grid = (rows, places)
            return how.call(
                model,
                jnp.zeros(grid, jnp.int32),
                positions=jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), grid),
                mask=jnp.ones(grid, jnp.int32),
                cache={},
            )

        return self.adapted.caching.empty(rows, places, dtype, use)

    def cached(
        self,
        params: Tree,
        model_state: Tree,
        cache: Any,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        mask_BM: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """Return the float32 logits [B, L, V] of the next L tokens, and the cache that holds them.

        Args:
          params, model_state: the model's leaves and its other collections.
          cache: the cache of the tokens before.
          tokens_BL, positions_BL: the next tokens and their positions, int32.
          mask_BM: 1 for each of the cache's M places that holds or will hold a real token; the
            zeros are on the left.
        """
        how = self.with_cache
        assert how is not None
        if how.traced is not None:
            place, places = positions_BL[0, 0], mask_BM.shape[1]
            return how.traced.read(params, model_state, cache, tokens_BL, place, places)
        held, given = cache, {"positions": positions_BL, "mask": mask_BM, "cache": cache}
        if how.make is not None:
            assert self.adapted.bound is not None
            result = how.call(self.adapted.bound(params, model_state), tokens_BL, **given)
            held = cache_of(result, cache)
        else:
            caching = self.adapted.caching
            assert caching is not None

            def model(*args: Any, **kwargs: Any) -> Any:
                nonlocal held
                result, held = caching.apply(params, model_state, held, *args, **kwargs)
                return result

            result = how.call(model, tokens_BL, **given)
        held = jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), cache, held)
        return logits_of(result, tokens_BL.shape), held


def logits_of(result: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return float32 logits, read from the result of a model's call.

    Args:
      result: an array; or a tuple that begins with one; or an object or a dict with `logits`.
      shape: the shape of the tokens, [B, L].

    Raises:
      NoLogitsError: the result holds no array [B, L, V].
    """
    found: Any = result
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, Mapping):
        found = found.get("logits", found)
    found = getattr(found, "logits", found)
    is_array = hasattr(found, "dtype")
    if not is_array or len(found.shape) != 3 or tuple(found.shape[:2]) != tuple(shape):
        what = jax.typeof(found).str_short() if is_array else type(found).__name__
        rows, length = shape
        raise NoLogitsError(
            f"the model's call returned {what}, and generation needs logits [B, L, V] of tokens "
            f"[B, L] (here [{rows}, {length}]); pass call= with a function that returns them"
        )
    return found.astype(jnp.float32)


def cache_of(result: Any, cache: Any) -> Any:
    """Return the new cache from the result of a model's call: the part of it that has the tree
    structure and the shapes of the one that was given.

    Raises:
      ValueError: no part has them.
    """
    parts: list[Any] = []
    if isinstance(result, Mapping):
        parts = list(result.values())
    elif isinstance(result, tuple | list):
        parts = list(result)
    elif hasattr(result, "__dict__") or dataclasses.is_dataclass(result):
        parts = [getattr(result, f) for f in dir(result) if not f.startswith("_")]
    leaves, tree = jax.tree.flatten(cache)
    for part in parts:
        found, same = jax.tree.flatten(part)
        if same == tree and all(
            jnp.shape(a) == jnp.shape(b) for a, b in zip(leaves, found, strict=True)
        ):
            return part
    raise ValueError(
        "the model's call takes a cache, and returned none with the same tree and shapes; return "
        "(logits, cache)"
    )
