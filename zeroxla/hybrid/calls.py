"""How a language model is called: tokens in, logits out, with or without a cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The calls of a model that takes tokens int32[B, L] and returns logits [B, L, V].

    Attributes:
      adapted: the model.
      positions, mask: what its call names the tokens' positions and the mask of real tokens; None
        where it takes none.
    """

    adapted: Adapted
    positions: str | None
    mask: str | None

    @staticmethod
    def of(adapted: Adapted) -> Calls:
        """Find out how a model is called.

        Raises:
          ValueError: it is a pair of functions, which says nothing of logits.
        """
        if adapted.apply is None:
            raise ValueError(
                "the model is a pair (init, loss) and generation needs its logits; pass a flax "
                "module, whose call takes tokens [B, L] and returns logits [B, L, V]"
            )

        def named(word: str) -> str | None:
            return next((name for name in adapted.parameters if word in name.lower()), None)

        return Calls(adapted=adapted, positions=named("position"), mask=named("mask"))

    @property
    def has_cache(self) -> bool:
        """Whether rows of different lengths can be generated with a cache."""
        return None not in (self.adapted.caching, self.positions, self.mask)

    def shortcomings(self) -> list[str]:
        """Say what a user would not expect of the calls."""
        if self.has_cache:
            return []
        missing = 'cache (linen: a field "decode"; nnx: a method init_cache(shape, dtype))'
        if self.adapted.caching is not None:
            missing = "argument for positions or for the mask of its call, which padded rows need"
        each = "each new token takes a pass over the whole sequence"
        return [f"the model has no {missing}: {each}"]

    def forward(self, params: Tree, model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return float32 logits [B, L, V] of whole rows."""
        assert self.adapted.apply is not None
        return _logits(self.adapted.apply(params, model_state, tokens_BL))

    def empty_cache(self, rows: int, length: int, dtype: Any) -> Tree:
        """Return a cache without anything in it."""
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
        """Return float32 logits [B, L, V] of the next L tokens, and the cache with them in it."""
        caching, positions, mask = self.adapted.caching, self.positions, self.mask
        assert caching is not None
        assert positions is not None
        assert mask is not None
        arguments = {positions: positions_BL, mask: mask_BM}
        result, cache = caching.apply(params, model_state, cache, tokens_BL, **arguments)
        return _logits(result), cache


def _logits(result: Any) -> jax.Array:
    """Return what a model's call returned as float32 logits.

    Raises:
      ValueError: it is not an array of three dims.
    """
    found: Any = result[0] if isinstance(result, tuple) and result else result
    found = getattr(found, "logits", found)
    if not hasattr(found, "dtype") or len(found.shape) != 3:
        what = jax.typeof(found).str_short() if hasattr(found, "dtype") else type(found).__name__
        raise ValueError(f"the model's call returned {what}, and generation needs logits [B, L, V]")
    return found.astype(jnp.float32)
