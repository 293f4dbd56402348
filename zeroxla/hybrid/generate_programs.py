"""The programs of a generator on the tensor mesh: to parts of leaves, new tokens, whole rows.

Shape letters: B rows, L tokens, P prompt places (left-padded), N new tokens, V vocabulary.
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

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import DecodeShape, decode
from zeroxla.hybrid.model import Model
from zeroxla.hybrid.next_logits import Reader
from zeroxla.hybrid.reshard import (
    DATA,
    ROWS,
    TENSOR,
    StoredModel,
    part_spec,
    stored_spec,
    whole_rows,
)
from zeroxla.hybrid.sampling import log_probs
from zeroxla.mesh.axes import NODE
from zeroxla.split.run_parts import Sharing
from zeroxla.split.tensor_plan import TensorPlan

WHOLE = PartitionSpec()


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

    def reshard(self, leaves: Sequence[jax.Array], stored: StoredModel) -> list[jax.Array]:
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
        shape: DecodeShape,
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
        places = shape.prompt + shape.new

        def local(
            leaves: list[jax.Array], model_state: Tree, batch: Any, key: jax.Array, options: Any
        ) -> dict[str, jax.Array]:
            reader = Reader(
                model=self.model,
                plan=self.plan,
                sharing=self.sharing,
                leaves=leaves,
                model_state=model_state,
            )
            if self.model.calls.has_cache:
                next_logits, memory = reader.with_cache(batch, places, self.prefill_tokens)
            else:
                next_logits, memory = reader.without_cache(batch, places)
            copy = lax.axis_index(NODE) * self.mesh.shape[DATA] + lax.axis_index(DATA)
            numbers_B = copy * shape.rows + jnp.arange(shape.rows)
            keys_B = jax.vmap(partial(jax.random.fold_in, key))(numbers_B)
            return decode(next_logits, memory, batch["prompt"][:, -1], keys_B, options, shape)

        specs = (self._specs, WHOLE, ROWS, WHOLE, WHOLE)
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

    def whole_rows(self, rows: Any) -> Any:
        """Return rows, as the functions above return them, whole on every device."""

        def local(rows: Any) -> Any:
            return jax.tree.map(lambda x: whole_rows(x, self.mesh), rows)

        return self._map(local, (ROWS,), WHOLE)(rows)

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
