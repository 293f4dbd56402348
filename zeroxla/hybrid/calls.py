"""Calls a language model: tokens go in, logits come out, with or without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCalls:
    """Calls a model that takes tokens int32[B, L] and returns logits [B, L, V].

    Attributes:
      adapted: the model.
      positions: the name of the argument for the tokens' positions; None if there is none.
      mask: the name of the argument for the mask of real tokens; None if there is none.
    """

    adapted: Adapted
    positions: str | None
    mask: str | None

    @staticmethod
    def of(adapted: Adapted) -> ModelCalls:
        """Find out how a model is called.

        Raises:
          ValueError: the model is a pair (init, loss), which returns no logits.
        """
        if adapted.apply is None:
            raise ValueError(
                "the model is a pair (init, loss) and generation needs its logits; pass a flax "
                "module, whose call takes tokens [B, L] and returns logits [B, L, V]"
            )

        def named(word: str) -> str | None:
            return next((name for name in adapted.parameters if word in name.lower()), None)

        return ModelCalls(adapted=adapted, positions=named("position"), mask=named("mask"))

    @property
    def has_cache(self) -> bool:
        """Whether rows of different lengths can be generated with a cache."""
        return None not in (self.adapted.caching, self.positions, self.mask)

    def shortcomings(self) -> list[str]:
        """Return warnings about calls that are slower than a user would expect."""
        if self.has_cache:
            return []
        missing = 'cache (linen: a field "decode"; nnx: a method init_cache(shape, dtype))'
        if self.adapted.caching is not None:
            missing = "argument for positions or for the mask of its call, which padded rows need"
        each = "each new token takes a pass over the whole sequence"
        return [f"the model has no {missing}: {each}"]

    def forward(self, params: Tree, model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the float32 logits [B, L, V] of whole rows."""
        assert self.adapted.apply is not None
        return _logits(self.adapted.apply(params, model_state, tokens_BL))

    def empty_cache(self, rows: int, length: int, dtype: Any) -> Tree:
        """Return an empty cache.

        Args:
          rows, length: the number of rows, and of places in each.
          dtype: the dtype of floating arrays in it; None takes the model's own.
        """
        assert self.adapted.caching is not None
        return self.adapted.caching.empty(rows, length, dtype)

    def cached(
        self,
        params: Tree,
        model_state: Tree,
        cache: Tree,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        mask_BM: jax.Array,
    ) -> tuple[jax.Array, Tree]:
        """Return the float32 logits [B, L, V] of the next L tokens, and the cache that holds them.

        Args:
          params, model_state: the model's leaves and its other collections.
          cache: the cache of the tokens before.
          tokens_BL, positions_BL: the next tokens and their positions, int32.
          mask_BM: 1 for each of the cache's M places that holds or will hold a real token.
        """
        caching, positions, mask = self.adapted.caching, self.positions, self.mask
        assert caching is not None
        assert positions is not None
        assert mask is not None
        arguments = {positions: positions_BL, mask: mask_BM}
        result, cache = caching.apply(params, model_state, cache, tokens_BL, **arguments)
        return _logits(result), cache


def _logits(result: Any) -> jax.Array:
    """Return float32 logits, read from the result of a model's call.

    Raises:
      ValueError: the result holds no array of three dims.
    """
    found: Any = result[0] if isinstance(result, tuple) and result else result
    found = getattr(found, "logits", found)
    if not hasattr(found, "dtype") or len(found.shape) != 3:
        what = jax.typeof(found).str_short() if hasattr(found, "dtype") else type(found).__name__
        raise ValueError(f"the model's call returned {what}, and generation needs logits [B, L, V]")
    return found.astype(jnp.float32)
