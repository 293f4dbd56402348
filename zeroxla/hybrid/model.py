"""A language model whose leaves lie as a tensor-parallel plan says: its plan, and its programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.calls import Calls
from zeroxla.hybrid.reshard import StoredModel
from zeroxla.program.paths import leaf_path
from zeroxla.program.shapes import shapes_of
from zeroxla.split.dims_flow import seeded
from zeroxla.split.part_program import PartProgram, leaf_dims
from zeroxla.split.proof import prove
from zeroxla.split.tensor_plan import TensorPlan, plan
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A language model, of which only shapes are known.

    Attributes:
      calls: how it is called.
      params: its leaves, in the dtype in which it computes.
      model_state: its other collections.
      cache_dtype: of what is floating in its cache; the model's own if None.
    """

    calls: Calls
    params: Tree
    model_state: Tree
    cache_dtype: Any = None

    @staticmethod
    def of(step: Step, stored: StoredModel, cache_dtype: Any = None) -> Model:
        """Make the model of a step, which has seen a batch.

        Args:
          step: of a flax module.
          stored: how its state has the leaves.
          cache_dtype: that in which the model computes if None.

        Raises:
          ValueError: the step is of a pair of functions.
        """
        state, dtype = step.shapes(), step.config.compute_dtype
        naturals = [
            jax.ShapeDtypeStruct(p.shape, x.dtype)
            for p, x in zip(stored.placements, jax.tree.leaves(state.params), strict=True)
        ]
        return Model(
            calls=Calls.of(step.adapted.base or step.adapted),
            params=stored.leaves(dtype, stored.tree.unflatten(naturals)),
            model_state=shapes_of(state.model_state),
            cache_dtype=jnp.dtype(cache_dtype or dtype),
        )

    def plan(self, parts: int) -> TensorPlan:
        """Choose a layout of the leaves over so many devices, for every way of calling the model,
        and prove it on a small instance.

        Raises:
          ValueError: the model has heads, and `parts` does not divide their number.
        """
        # What is proved is that the sums are the same, not that they are rounded alike.
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), self.params)
        exact = dataclasses.replace(self, params=wide, cache_dtype=jnp.dtype(jnp.float32))
        refused: set[str] = set()
        while True:
            leaves = leaf_dims(self.params)
            programs = exact._samples(leaves)
            found = plan(programs, leaves, self._paths(), parts, refused)
            # The first one: the other calls use the leaves alike.
            wrong = prove(programs[0], leaves, parts) if parts > 1 else set()
            if not wrong:
                return found
            refused |= wrong

    def forward(self, found: TensorPlan, rows: int, length: int) -> PartProgram:
        """Return `(params, {}, model_state, tokens) -> logits` of whole rows."""
        program = self._forward(self._seeded(found), rows, length)
        program.check()
        return program

    def cached(self, found: TensorPlan, rows: int, length: int, num_tokens: int) -> PartProgram:
        """Return `(params, cache, model_state, tokens, positions, mask) -> logits` of the next
        tokens, with a cache of `length` places."""
        program = self._cached(self._seeded(found), rows, length, num_tokens)
        program.check()
        return program

    def _seeded(self, found: TensorPlan) -> list:
        return [seeded(row.shape, row.dim, row.factors) for row in found.rows]

    def _paths(self) -> list[str]:
        return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.params)]

    def _samples(self, leaves: list) -> list[PartProgram]:
        """Return programs of every kind of call."""
        length = min(self.calls.adapted.context or 8, 8)
        forward = self._forward(leaves, 2, length // 2)
        if not self.calls.has_cache:
            return [forward]
        several, one = max(length // 2 - 1, 1), 1
        return [*(self._cached(leaves, 2, length, n) for n in (several, one)), forward]

    def _forward(self, leaves: list, rows: int, length: int) -> PartProgram:
        def function(params: Tree, cache: Tree, model_state: Tree, tokens: jax.Array) -> Any:
            return self.calls.forward(params, model_state, tokens), cache

        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        return PartProgram.of(function, leaves, self.params, {}, self.model_state, tokens)

    def _cached(self, leaves: list, rows: int, length: int, num_tokens: int) -> PartProgram:
        def function(
            params: Tree, cache: Tree, model_state: Tree, tokens: Any, positions: Any, mask: Any
        ) -> Any:
            return self.calls.cached(params, model_state, cache, tokens, positions, mask)

        cache = jax.eval_shape(lambda: self.calls.empty_cache(rows, length, self.cache_dtype))
        tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
        mask = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        return PartProgram.of(
            function, leaves, self.params, cache, self.model_state, tokens, tokens, mask
        )
