"""The programs that generate on the tensor mesh: reshard leaves, continue prompts, score rows.

Shape letters: B rows, L tokens, P prompt places (left-padded), N new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.decode import DecodeShape, decode
from zeroxla.hybrid.model import LanguageModel
from zeroxla.hybrid.next_logits import LocalModel
from zeroxla.hybrid.reshard import (
    TENSOR,
    StoredModel,
    number_of_copy,
    part_spec,
    rows_spec,
    stored_spec,
    whole_rows,
)
from zeroxla.hybrid.sampling import log_probs
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.tensor_plan import TensorPlan

WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GeneratePrograms:
    """Functions of global arrays on the tensor mesh, made to be jitted.

    Attributes:
      model: the model that generates.
      plan: how the model's leaves are split.
      mesh: the mesh of `tensor_mesh`.
      prefill_tokens: the number of tokens of each prompt that are read at a time.
    """

    model: LanguageModel
    plan: TensorPlan
    mesh: Mesh
    prefill_tokens: int

    @property
    def axis(self) -> SplitAxis:
        """The axis over which leaves and caches are split."""
        parts = self.plan.parts
        return SplitAxis(parts=parts, name=TENSOR if parts > 1 else None)

    @property
    def copies(self) -> int:
        """The number of device groups that each hold the model."""
        return self.mesh.size // self.plan.parts

    def reshard(self, leaves: Sequence[jax.Array], stored: StoredModel) -> list[jax.Array]:
        """Return the tensor-parallel parts of stored leaves, in the model's compute dtype."""
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
          leaves: the tensor-parallel parts.
          model_state: the model's other collections, whole on every device.
          batch: `prompt` int32[B, P] and `length` int32[B], rows split as `rows_spec` says.
          key: the call's PRNG key.
          options: as for `decode`.
          shape: the shape of one device's rows.

        Returns:
          A dict of arrays, as `decode` returns it.
        """
        places = self.model.whole_length(shape.prompt + shape.new)
        no_cache = self.model.no_cache_for(shape.rows, places)
        if no_cache is not None and self.model.calls.has_cache:
            warnings.warn(
                f"{no_cache}: each new token takes a pass over the whole sequence", stacklevel=2
            )

        def local(
            leaves: list[jax.Array], model_state: Tree, batch: Any, key: jax.Array, options: Any
        ) -> dict[str, jax.Array]:
            model = LocalModel(
                model=self.model,
                plan=self.plan,
                axis=self.axis,
                leaves=leaves,
                model_state=model_state,
            )
            if no_cache is None:
                start = model.with_cache(batch, places, self.prefill_tokens)
            else:
                start = model.without_cache(batch, places)
            numbers_B = number_of_copy(self.mesh) * shape.rows + jnp.arange(shape.rows)
            keys_B = jax.vmap(partial(jax.random.fold_in, key))(numbers_B)
            return decode(start, keys_B, options, shape)

        rows = rows_spec(self.mesh)
        specs = (self._specs, WHOLE, rows, WHOLE, WHOLE)
        return self._map(local, specs, rows)(leaves, model_state, batch, key, options)

    def cache_shapes(self, rows: int, places: int) -> Any:
        """Return the shapes of one device's part of a cache for so many of its rows and places; ()
        if there is none."""
        if self.model.no_cache_for(rows, places) is not None:
            return ()
        return self.model.cached(self.plan, rows, places, 1).carry_shapes(self.axis)

    def logprobs(
        self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array
    ) -> jax.Array:
        """Return the log-probability of each token after the first, float32[B, L - 1]."""

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
        """Return rows that the functions above returned, whole on every device."""

        def local(rows: Any) -> Any:
            return jax.tree.map(lambda x: whole_rows(x, self.mesh), rows)

        return self._map(local, (rows_spec(self.mesh),), WHOLE)(rows)

    def _forward(self, take: Any, *args: Any) -> jax.Array:
        """Return `take(logits, tokens)`, computed in one pass over whole rows."""

        def local(leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
            program = self.model.forward(self.plan, *tokens_BL.shape)
            logits_BLV, _ = program(self.axis, leaves, {}, model_state, tokens_BL)
            return take(logits_BLV, tokens_BL)

        rows = rows_spec(self.mesh)
        return self._map(local, (self._specs, WHOLE, rows), rows)(*args)

    @property
    def _specs(self) -> list[PartitionSpec]:
        return [part_spec(row) for row in self.plan.rows]

    def _map(self, local: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
