"""Computes the logits of each next token: with a cache of keys and values, or by whole passes.

Shape letters: B rows, P prompt places (left-padded), V vocabulary, M places of the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import DecodeStart, Unread
from zeroxla.hybrid.model import LanguageModel
from zeroxla.split.part_program import PartProgram
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

    def with_cache(self, batch: Prompts, places: int, prefill_tokens: int) -> DecodeStart:
        """Return the start of decoding with a cache that holds the prompts.

        Args:
          batch: the prompts.
          places: the number of the cache's places, M.
          prefill_tokens: the number of tokens of each prompt that are read at a time.
        """
        how = self.model.calls.with_cache
        assert how is not None
        prefill_tokens = 1 if how.one_token else prefill_tokens
        if how.rows == "aligned":
            return self._aligned(batch, places, prefill_tokens)
        return self._padded(batch, places, prefill_tokens)

    def _padded(self, batch: Prompts, places: int, prefill_tokens: int) -> DecodeStart:
        """Pad prompts on the left, so that all rows draw their first token together."""
        prompt_BP, length_B = batch["prompt"], batch["length"]
        rows, num = prompt_BP.shape
        # Padding is on the left. Places after the prompt count as real: attention reaches none
        # before it holds a token.
        pad_B = num - length_B
        mask_BM = (jnp.arange(places) >= pad_B[:, None]).astype(jnp.int32)
        step = self.model.cached(self.plan, rows, places, 1)

        def read_prompts() -> Tree:
            # The decoding loop reads the last token itself, for its first logits.
            cache = self._empty_cache(step, rows, places)
            return self._prefill(cache, prompt_BP[:, :-1], mask_BM, prefill_tokens)

        def next_logits(cache: Tree, token_B: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            token_B1, position_B1 = token_B[:, None], (length_B - 1 + i)[:, None]
            logits_B1V, cache = step(
                self.axis, self.leaves, cache, self.model_state, token_B1, position_B1, mask_BM
            )
            return logits_B1V[:, 0], cache

        token = prompt_BP[:, -1]
        return DecodeStart(next_logits=next_logits, read_prompts=read_prompts, token=token)

    def _aligned(self, batch: Prompts, places: int, prefill_tokens: int) -> DecodeStart:
        """Begin all rows at the cache's first place, for caches that know nothing of padding.

        The tokens that all prompts have are read `prefill_tokens` at a time. The decoding loop then
        reads the rest of the longer prompts while the shorter ones draw their first tokens.
        """
        length_B = batch["length"]
        rows, num = batch["prompt"].shape
        prompt_BP = jax.vmap(lambda row, pad: jnp.roll(row, -pad))(batch["prompt"], num - length_B)
        mask_BM = jnp.ones((rows, places), jnp.int32)
        step = self.model.cached(self.plan, rows, places, 1)
        block = max(min(prefill_tokens, num - 1), 1)
        fill = self.model.cached(self.plan, rows, places, block)

        def positions(start: jax.Array, num: int) -> jax.Array:
            return jnp.broadcast_to(start + jnp.arange(num, dtype=jnp.int32), (rows, num))

        def read(i: jax.Array, cache: Tree) -> Tree:
            piece = lax.dynamic_slice_in_dim(prompt_BP, i * block, block, axis=1)
            inputs = (self.model_state, piece, positions(i * block, block), mask_BM)
            return fill(self.axis, self.leaves, cache, *inputs)[1]

        num_blocks = (jnp.min(length_B) - 1) // block
        first = num_blocks * block

        def read_prompts() -> Tree:
            with jax.named_scope("prefill"):
                cache = self._empty_cache(step, rows, places)
                return lax.fori_loop(0, num_blocks, read, cache)

        def next_logits(cache: Tree, token_B: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            inputs = (self.model_state, token_B[:, None], positions(first + i, 1), mask_BM)
            logits_B1V, cache = step(self.axis, self.leaves, cache, *inputs)
            return logits_B1V[:, 0], cache

        return DecodeStart(
            next_logits=next_logits,
            read_prompts=read_prompts,
            token=lax.dynamic_index_in_dim(prompt_BP, first, axis=1, keepdims=False),
            unread=Unread(prompt=prompt_BP, first=first, behind=length_B - 1 - first),
        )

    def _empty_cache(self, step: PartProgram, rows: int, places: int) -> Any:
        """Return this device's part of an empty cache."""
        how = self.model.calls.with_cache
        assert how is not None
        if how.make is not None:  # The model may begin with other numbers than zeros.
            return step.carry_parts(self.axis, self.model.empty_cache(rows, places))
        shapes = step.carry_shapes(self.axis)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

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

    def without_cache(self, batch: Prompts, places: int) -> DecodeStart:
        """Return the start of decoding without a cache; its memory is the tokens int32[B, M].

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

        token = prompt_BP[:, -1]
        return DecodeStart(next_logits=next_logits, read_prompts=lambda: tokens_BM, token=token)
