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
from zeroxla.hybrid.decode import Carry, Decoder, DecodeShape, decode, decode_turns
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
          options: as for `Decoder`.
          shape: the shape of one device's rows.

        Returns:
          A dict of arrays, as `decode` returns it.
        """
        self._warn_without_cache(shape)

        def local(*args: Any) -> dict[str, jax.Array]:
            return decode(self._decoder(shape, *args))

        rows = rows_spec(self.mesh)
        return self._map(local, self._inputs, rows)(leaves, model_state, batch, key, options)

    def begin(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, jax.Array],
        key: jax.Array,
        options: dict[str, Any],
        shape: DecodeShape,
    ) -> Carry:
        """Read prompts; return what `advance` begins with, an array of each device's own.

        Args:
          leaves, model_state, batch, key, options, shape: as for `generate`.
        """
        self._warn_without_cache(shape)

        def local(*args: Any) -> Carry:
            return _stacked(self._decoder(shape, *args).begin())

        return self._map(local, self._inputs, self._own)(leaves, model_state, batch, key, options)

    def advance(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: dict[str, jax.Array],
        key: jax.Array,
        options: dict[str, Any],
        carry: Carry,
        shape: DecodeShape,
        num_turns: int,
    ) -> tuple[Carry, dict[str, jax.Array]]:
        """Take some turns of decoding.

        Args:
          leaves, model_state, batch, key, options, shape: as for `begin`.
          carry: what `begin`, or the call before, has returned.
          num_turns: the number of turns.

        Returns:
          What the next call begins with, and a dict of arrays, as `decode_turns` returns it.
        """

        def local(
            leaves: Any, model_state: Any, batch: Any, key: Any, options: Any, carry: Carry
        ) -> tuple[Carry, dict[str, jax.Array]]:
            decoder = self._decoder(shape, leaves, model_state, batch, key, options)
            carry = jax.tree.map(lambda x: x[0], carry)
            carry, drawn = decode_turns(decoder, carry, num_turns)
            return _stacked(carry), drawn

        outputs = (self._own, rows_spec(self.mesh))
        return self._map(local, (*self._inputs, self._own), outputs)(
            leaves, model_state, batch, key, options, carry
        )

    def _decoder(
        self,
        shape: DecodeShape,
        leaves: list[jax.Array],
        model_state: Tree,
        batch: Any,
        key: jax.Array,
        options: dict[str, Any],
    ) -> Decoder:
        """Return the decoder of one device's rows; inside `shard_map`."""
        places = self._places(shape)
        model = LocalModel(
            model=self.model,
            plan=self.plan,
            axis=self.axis,
            leaves=leaves,
            model_state=model_state,
        )
        if self.model.no_cache_for(shape.rows, places) is None:
            start = model.with_cache(batch, places, self.prefill_tokens)
        else:
            start = model.without_cache(batch, places)
        numbers_B = number_of_copy(self.mesh) * shape.rows + jnp.arange(shape.rows)
        keys_B = jax.vmap(partial(jax.random.fold_in, key))(numbers_B)
        return Decoder(start=start, keys_B=keys_B, options=options, shape=shape)

    def _places(self, shape: DecodeShape) -> int:
        """Return the number of places of a cache for prompts and their continuations."""
        return self.model.whole_length(shape.prompt + shape.new)

    def _warn_without_cache(self, shape: DecodeShape) -> None:
        no_cache = self.model.no_cache_for(shape.rows, self._places(shape))
        if no_cache is not None and self.model.calls.has_cache:
            warnings.warn(
                f"{no_cache}: each new token takes a pass over the whole sequence", stacklevel=3
            )

    def cache_shapes(self, rows: int, places: int) -> Any:
        """Return the shapes of one device's part of a cache for so many of its rows and places; ()
        if there is none."""
        if self.model.no_cache_for(rows, places) is not None:
            return ()
        return self.model.cached(self.plan, rows, places, 1).carry_shapes(self.axis)

    def logprobs(
        self,
        leaves: list[jax.Array],
        model_state: Tree,
        tokens_BL: jax.Array,
        targets_BL: jax.Array,
    ) -> jax.Array:
        """Return the log-probability of each target after the tokens up to it, float32[B, L]."""

        def of_targets(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
            flat = logits_BLV.reshape(targets_BL.size, -1)
            return log_probs(flat, targets_BL.reshape(-1)).reshape(targets_BL.shape)

        return self._forward(of_targets, leaves, model_state, tokens_BL, targets_BL)

    def logits(self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the logits of whole rows, float32[B, L, V]."""
        return self._forward(lambda logits: logits, leaves, model_state, tokens_BL)

    def values(self, leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array) -> jax.Array:
        """Return the first logit at each token, float32[B, L]."""
        return self._forward(lambda logits: logits[..., 0], leaves, model_state, tokens_BL)

    def whole_rows(self, rows: Any) -> Any:
        """Return rows that the functions above returned, whole on every device."""

        def local(rows: Any) -> Any:
            return jax.tree.map(lambda x: whole_rows(x, self.mesh), rows)

        return self._map(local, (rows_spec(self.mesh),), WHOLE)(rows)

    def _forward(
        self,
        take: Any,
        leaves: list[jax.Array],
        model_state: Tree,
        tokens_BL: jax.Array,
        *others: jax.Array,
    ) -> jax.Array:
        """Return `take(logits, *others)`, computed in one pass over whole rows. The others are
        split by rows, too."""

        def local(
            leaves: list[jax.Array], model_state: Tree, tokens_BL: jax.Array, *others: jax.Array
        ) -> jax.Array:
            program = self.model.forward(self.plan, *tokens_BL.shape)
            logits_BLV, _ = program(self.axis, leaves, {}, model_state, tokens_BL)
            return take(logits_BLV, *others)

        rows = rows_spec(self.mesh)
        specs = (self._specs, WHOLE, rows, *(rows for _ in others))
        return self._map(local, specs, rows)(leaves, model_state, tokens_BL, *others)

    @property
    def _inputs(self) -> tuple[Any, ...]:
        """How leaves, model state, batch, key and options are split."""
        return self._specs, WHOLE, rows_spec(self.mesh), WHOLE, WHOLE

    @property
    def _own(self) -> PartitionSpec:
        """How arrays are split whose first dim is the number of the device."""
        return PartitionSpec(self.mesh.axis_names)

    @property
    def _specs(self) -> list[PartitionSpec]:
        return [part_spec(row) for row in self.plan.rows]

    def _map(self, local: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _stacked(tree: Any) -> Any:
    """Return a device's own arrays as parts of arrays of all devices, along a new first dim."""
    return jax.tree.map(lambda x: x[None], tree)
