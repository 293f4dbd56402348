"""Computes the logits of each next token: with a cache of keys and values, or by whole passes.

Shape letters: B rows, P prompt places (left-padded), V vocabulary, M places of the cache.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import NextLogits
from zeroxla.hybrid.model import LanguageModel
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.tensor_plan import TensorPlan

Prompts = dict[str, jax.Array]
"""`prompt` int32[B, P] and `length` int32[B]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalModel:
    """The model as one device runs it, inside `shard_map`.

    Attributes:
      model: the model's calls and shapes.
      plan: how the model's leaves are split.
      axis: the axis over which they are split.
      leaves: this device's part of each leaf.
      model_state: the model's other collections, whole.
    """

    model: LanguageModel
    plan: TensorPlan
    axis: SplitAxis
    leaves: list[jax.Array]
    model_state: Tree

    def with_cache(
        self, batch: Prompts, places: int, prefill_tokens: int
    ) -> tuple[NextLogits, Tree]:
        """Return the function that computes the next logits, and a cache that holds the prompts.

        Args:
          batch: the prompts.
          places: the number of the cache's places, M.
          prefill_tokens: the number of tokens of each prompt that are read at a time.
        """
        prompt_BP, length_B = batch["prompt"], batch["length"]
        rows, num = prompt_BP.shape
        # Padding is on the left. Places after the prompt count as real: attention reaches none
        # before it holds a token.
        pad_B = num - length_B
        mask_BM = (jnp.arange(places) >= pad_B[:, None]).astype(jnp.int32)
        step = self.model.cached(self.plan, rows, places, 1)
        shapes = step.carry_shapes(self.axis)
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # The decoding loop reads the last token itself, for its first logits.
        cache = self._prefill(cache, prompt_BP[:, :-1], mask_BM, prefill_tokens)

        def next_logits(cache: Tree, token_B: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            token_B1, position_B1 = token_B[:, None], (length_B - 1 + i)[:, None]
            logits_B1V, cache = step(
                self.axis, self.leaves, cache, self.model_state, token_B1, position_B1, mask_BM
            )
            return logits_B1V[:, 0], cache

        return next_logits, cache

    def _prefill(
        self, cache: Tree, tokens_BP: jax.Array, mask_BM: jax.Array, prefill_tokens: int
    ) -> Tree:
        """Return the cache with prompts in it.

        Prompts are read `prefill_tokens` at a time, because the scores of attention take a float32
        for each token read and each place of the cache.
        """
        rows, length = tokens_BP.shape
        pad_B = jnp.sum(mask_BM == 0, axis=1, dtype=jnp.int32)

        def read(cache: Tree, start: jax.Array | int, num: int) -> Tree:
            fill = self.model.cached(self.plan, rows, mask_BM.shape[1], num)
            piece = lax.dynamic_slice_in_dim(tokens_BP, start, num, axis=1)
            positions = jnp.maximum(start + jnp.arange(num) - pad_B[:, None], 0)
            inputs = (self.model_state, piece, positions, mask_BM)
            return fill(self.axis, self.leaves, cache, *inputs)[1]

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
        """Return the function that computes the next logits, and the tokens int32[B, M] so far.

        Each new token takes a pass over all M places. Padding is on the right, where causal
        attention does not see it.
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
            logits_BMV, _ = program(self.axis, self.leaves, {}, self.model_state, tokens_BM)
            return logits_BMV[rows, last_B], tokens_BM

        return next_logits, tokens_BM
