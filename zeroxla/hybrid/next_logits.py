"""The logits of each next token: with a cache of keys and values, or by whole passes.

Shape letters: B rows, P prompt places (left-padded), V vocabulary, M places of the cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import NextLogits
from zeroxla.hybrid.model import Model
from zeroxla.split.run_parts import Sharing
from zeroxla.split.tensor_plan import TensorPlan

Prompts = dict[str, jax.Array]
"""`prompt` int32[B, P] and `length` int32[B]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reader:
    """A model on one device, inside `shard_map`.

    Attributes:
      model, plan, sharing: see there.
      leaves: this device's parts.
      model_state: whole.
    """

    model: Model
    plan: TensorPlan
    sharing: Sharing
    leaves: list[jax.Array]
    model_state: Tree

    def with_cache(
        self, batch: Prompts, places: int, prefill_tokens: int
    ) -> tuple[NextLogits, Tree]:
        """Return the function of the next logits, and the cache that has read the prompts.

        Args:
          batch: prompts.
          places: M.
          prefill_tokens: how many tokens of each prompt are read at a time.
        """
        prompt_BP, length_B = batch["prompt"], batch["length"]
        rows, num = prompt_BP.shape
        # The padding is on the left; places after the prompt are real when they are reached.
        pad_B = num - length_B
        mask_BM = (jnp.arange(places) >= pad_B[:, None]).astype(jnp.int32)
        step = self.model.cached(self.plan, rows, places, 1)
        shapes = step.cache_shapes(self.sharing)
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # The last token's logits are the loop's own first ones.
        cache = self._prefill(cache, prompt_BP[:, :-1], mask_BM, prefill_tokens)

        def next_logits(cache: Tree, token_B: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            token_B1, position_B1 = token_B[:, None], (length_B - 1 + i)[:, None]
            logits_B1V, cache = step(
                self.sharing, self.leaves, cache, self.model_state, token_B1, position_B1, mask_BM
            )
            return logits_B1V[:, 0], cache

        return next_logits, cache

    def _prefill(
        self, cache: Tree, tokens_BP: jax.Array, mask_BM: jax.Array, prefill_tokens: int
    ) -> Tree:
        """Return the cache with prompts in it, read in pieces: scores of attention are float32 for
        each token of a piece and each place."""
        rows, length = tokens_BP.shape
        pad_B = jnp.sum(mask_BM == 0, axis=1, dtype=jnp.int32)

        def read(cache: Tree, start: jax.Array | int, num: int) -> Tree:
            fill = self.model.cached(self.plan, rows, mask_BM.shape[1], num)
            piece = lax.dynamic_slice_in_dim(tokens_BP, start, num, axis=1)
            positions = jnp.maximum(start + jnp.arange(num) - pad_B[:, None], 0)
            inputs = (self.model_state, piece, positions, mask_BM)
            return fill(self.sharing, self.leaves, cache, *inputs)[1]

        with jax.named_scope("prefill"):
            num = min(prefill_tokens, length)
            first = length % num if num else 0
            if first:
                cache = read(cache, 0, first)
            if num:
                starts = jnp.arange(first, length, num)
                cache, _ = lax.scan(lambda cache, i: (read(cache, i, num), None), cache, starts)
        return cache

    def without_cache(self, batch: Prompts, places: int) -> tuple[NextLogits, jax.Array]:
        """Return the function of the next logits, and all places' tokens int32[B, M].

        Every token takes a pass over all places; padding is on the right, where causal attention
        does not see it.
        """
        prompt_BP, length_B = batch["prompt"], batch["length"]
        num_rows, num = prompt_BP.shape
        rows = jnp.arange(num_rows)
        program = self.model.forward(self.plan, num_rows, places)
        left_BM = jnp.pad(prompt_BP, ((0, 0), (0, places - num)))
        tokens_BM = jax.vmap(lambda row, shift: jnp.roll(row, -shift))(left_BM, num - length_B)

        def next_logits(
            tokens_BM: jax.Array, token_B: jax.Array, i: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            last_B = length_B - 1 + i
            tokens_BM = tokens_BM.at[rows, last_B].set(token_B)
            logits_BMV, _ = program(self.sharing, self.leaves, {}, self.model_state, tokens_BM)
            return logits_BMV[rows, last_B], tokens_BM

        return next_logits, tokens_BM
