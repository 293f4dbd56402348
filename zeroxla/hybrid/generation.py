"""The compiled programs of a generator: from the training layout to parts, then token by token.

Shape letters: B rows, P prompt places (left-padded), N new tokens, M = P + N places of the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.adapters.base import Tree
from zeroxla.hybrid.model import Model
from zeroxla.hybrid.parts import Sharing
from zeroxla.hybrid.reshard import DATA, ROWS, TENSOR, Stored, part_spec, stored_spec
from zeroxla.hybrid.sampling import log_probs, sample
from zeroxla.hybrid.tensor_parallel import TensorPlan
from zeroxla.mesh import NODE

WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a program is compiled for.

    Attributes:
      rows: of one device's batch.
      prompt: P.
      new: N.
      greedy, filtered: see `sampling.sample`.
    """

    rows: int
    prompt: int
    new: int
    greedy: bool = False
    filtered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Generation:
    """Functions of global arrays on the tensor mesh, to be jitted.

    Attributes:
      model: what generates.
      plan: how its leaves lie.
      mesh: (node, tensor, data).
      prefill_tokens: how many tokens of each prompt are read at a time.
    """

    model: Model
    plan: TensorPlan
    mesh: Mesh
    prefill_tokens: int

    @property
    def sharing(self) -> Sharing:
        parts = self.plan.parts
        return Sharing(parts=parts, axis=TENSOR if parts > 1 else None)

    @property
    def copies(self) -> int:
        """How many groups of devices hold the model."""
        return self.mesh.size // self.plan.parts

    def reshard(self, leaves: Sequence[jax.Array], stored: Stored) -> list[jax.Array]:
        """Return the parts of stored leaves, in the dtype in which the model computes."""
        dtype = jax.tree.leaves(self.model.params)[0].dtype

        def local(shards: list[jax.Array]) -> list[jax.Array]:
            return stored.parts(shards, self.plan.rows, dtype, self.mesh)

        specs = ([stored_spec(p) for p in stored.placements],)
        return self._map(local, specs, self._specs)(list(leaves))

    def generate(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, jax.Array],
        key: jax.Array,
        options: dict[str, Any],
        shape: Shape,
    ) -> dict[str, jax.Array]:
        """Continue prompts.

        Args:
          leaves: parts.
          model_state: whole.
          batch: `prompt` int32[B, P] and `length` int32[B], rows over (node, data).
          key: of the call.
          options: `new` (at most N), `eos` (below 0: none), `pad`, int32 scalars, and `numbers` of
            `Sampling`.
          shape: for one device's rows.

        Returns:
          `tokens` int32[B, N], `logprobs` float32[B, N], `lengths` int32[B], and `finite` bool[B],
          whether all logits that a token was chosen from were finite.
        """
        run = self._with_cache if self.model.calls.has_cache else self._without
        specs = (self._specs, WHOLE, ROWS, WHOLE, WHOLE)
        local = partial(run, shape=shape)
        return self._map(local, specs, ROWS)(leaves, model_state, batch, key, options)

    def logprobs(
        self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array
    ) -> jax.Array:
        """Return the log-probability of each token but the first, float32[B, L - 1]."""

        def of_next(logits_BLV: jax.Array, tokens_BL: jax.Array) -> jax.Array:
            rows, length = tokens_BL.shape
            flat = logits_BLV[:, :-1].reshape(rows * (length - 1), -1)
            return log_probs(flat, tokens_BL[:, 1:].reshape(-1)).reshape(rows, length - 1)

        return self._forward(of_next, leaves, model_state, tokens_BL)

    def logits(self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the logits of whole rows, float32[B, L, V]."""
        return self._forward(lambda logits, _: logits, leaves, model_state, tokens_BL)

    def values(self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the first logit at each token, float32[B, L]."""
        return self._forward(lambda logits, _: logits[..., 0], leaves, model_state, tokens_BL)

    def _forward(self, take: Any, *args: Any) -> jax.Array:
        def local(leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
            program = self.model.forward(self.plan, *tokens_BL.shape)
            logits_BLV, _ = program(self.sharing, leaves, {}, model_state, tokens_BL)
            return take(logits_BLV, tokens_BL)

        return self._map(local, (self._specs, WHOLE, ROWS), ROWS)(*args)

    @property
    def _specs(self) -> list[PartitionSpec]:
        return [part_spec(row) for row in self.plan.rows]

    def _map(self, local: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _with_cache(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, jax.Array],
        key: jax.Array,
        options: dict[str, Any],
        shape: Shape,
    ) -> dict[str, jax.Array]:
        prompt_BP, length_B = batch["prompt"], batch["length"]
        places = shape.prompt + shape.new
        # The padding is on the left; places after the prompt are real when they are reached.
        pad_B = shape.prompt - length_B
        mask_BM = (jnp.arange(places) >= pad_B[:, None]).astype(jnp.int32)
        step = self.model.cached(self.plan, shape.rows, places, 1)
        shapes = step.cache_shapes(self.sharing)
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        # The last token's logits are the loop's own first ones.
        cache = self._prefill(leaves, model_state, cache, prompt_BP[:, :-1], mask_BM, shape)

        def logits(cache: Tree, token_B: jax.Array, i: jax.Array) -> tuple[jax.Array, Tree]:
            position_B = length_B - 1 + i
            logits_BLV, cache = step(
                self.sharing,
                leaves,
                cache,
                model_state,
                token_B[:, None],
                position_B[:, None],
                mask_BM,
            )
            return logits_BLV[:, 0], cache

        return self._loop(logits, cache, prompt_BP[:, -1], key, options, shape)

    def _prefill(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        cache: Tree,
        tokens_BP: jax.Array,
        mask_BM: jax.Array,
        shape: Shape,
    ) -> Tree:
        """Return the cache with prompts in it, read in pieces: scores of attention are float32 for
        each token of a piece and each place."""
        length = tokens_BP.shape[1]
        pad_B = jnp.sum(mask_BM == 0, axis=1, dtype=jnp.int32)

        def read(cache: Tree, start: jax.Array | int, num: int) -> Tree:
            fill = self.model.cached(self.plan, shape.rows, mask_BM.shape[1], num)
            piece = lax.dynamic_slice_in_dim(tokens_BP, start, num, axis=1)
            positions = jnp.maximum(start + jnp.arange(num) - pad_B[:, None], 0)
            return fill(self.sharing, leaves, cache, model_state, piece, positions, mask_BM)[1]

        with jax.named_scope("prefill"):
            num = min(self.prefill_tokens, length)
            first = length % num if num else 0
            if first:
                cache = read(cache, 0, first)
            if num:
                starts = jnp.arange(first, length, num)
                cache, _ = lax.scan(lambda cache, i: (read(cache, i, num), None), cache, starts)
        return cache

    def _without(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, jax.Array],
        key: jax.Array,
        options: dict[str, Any],
        shape: Shape,
    ) -> dict[str, jax.Array]:
        """Without a cache every token takes a pass over all places; padding is on the right, where
        causal attention does not see it."""
        length_B, rows = batch["length"], jnp.arange(shape.rows)
        places = shape.prompt + shape.new
        program = self.model.forward(self.plan, shape.rows, places)
        left_BM = jnp.pad(batch["prompt"], ((0, 0), (0, shape.new)))
        shift_B = shape.prompt - length_B
        tokens_BM = jax.vmap(lambda row, shift: jnp.roll(row, -shift))(left_BM, shift_B)

        def logits(
            tokens_BM: jax.Array, token_B: jax.Array, i: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            last_B = length_B - 1 + i
            tokens_BM = tokens_BM.at[rows, last_B].set(token_B)
            logits_BMV, _ = program(self.sharing, leaves, {}, model_state, tokens_BM)
            return logits_BMV[rows, last_B], tokens_BM

        return self._loop(logits, tokens_BM, batch["prompt"][:, -1], key, options, shape)

    def _loop(
        self,
        logits: Any,
        memory: Any,
        token_B: jax.Array,
        key: jax.Array,
        options: dict[str, Any],
        shape: Shape,
    ) -> dict[str, jax.Array]:
        """Draw tokens until each row has met the end or has as many as it may.

        Args:
          logits: (memory, token int32[B], index) -> (logits [B, V] of the next token, memory).
          memory: what it keeps.
          token_B: the last token of each prompt.
        """
        first = (lax.axis_index(NODE) * self.mesh.shape[DATA] + lax.axis_index(DATA)) * shape.rows
        keys_B = jax.vmap(partial(jax.random.fold_in, key))(first + jnp.arange(shape.rows))
        eos, pad = options["eos"], options["pad"]

        def going(carry: dict[str, Any]) -> jax.Array:
            return (carry["i"] < options["new"]) & ~jnp.all(carry["done"])

        def draw(carry: dict[str, Any]) -> dict[str, Any]:
            i, done_B = carry["i"], carry["done"]
            logits_BV, memory = logits(carry["memory"], carry["token"], i)
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
            numbers = options["numbers"]
            chosen_B = sample(
                keys, logits_BV, numbers, greedy=shape.greedy, filtered=shape.filtered
            )
            logprob_B = jnp.where(done_B, 0.0, log_probs(logits_BV, chosen_B))
            token_B = jnp.where(done_B, pad, chosen_B)
            finite_B = jnp.all(jnp.isfinite(logits_BV), axis=-1)
            return {
                "i": i + 1,
                "memory": memory,
                "token": token_B,
                "done": done_B | (token_B == eos),
                "finite": carry["finite"] & (finite_B | done_B),
                "lengths": carry["lengths"] + ~done_B,
                "tokens": lax.dynamic_update_slice(carry["tokens"], token_B[:, None], (0, i)),
                "logprobs": lax.dynamic_update_slice(carry["logprobs"], logprob_B[:, None], (0, i)),
            }

        grid = (shape.rows, shape.new)
        no_B = jnp.zeros(shape.rows, bool)
        start = {
            "i": jnp.int32(0),
            "memory": memory,
            "token": token_B,
            "done": no_B,
            "finite": ~no_B,
            "lengths": jnp.zeros(shape.rows, jnp.int32),
            "tokens": jnp.full(grid, pad, jnp.int32),
            "logprobs": jnp.zeros(grid, jnp.float32),
        }
        with jax.named_scope("decode"):
            end = lax.while_loop(going, draw, start)
        return {name: end[name] for name in ("tokens", "logprobs", "lengths", "finite")}
