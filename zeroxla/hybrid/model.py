"""A language model in the tensor-parallel layout: the plan of the layout, and its programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.calls import ModelCalls
from zeroxla.hybrid.reshard import StoredModel
from zeroxla.program.paths import leaf_path
from zeroxla.program.shapes import shapes_of
from zeroxla.split.dims_flow import planned_dims
from zeroxla.split.part_program import PartProgram, leaf_dims
from zeroxla.split.proof import prove
from zeroxla.split.tensor_plan import TensorPlan, make_tensor_plan
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel:
    """A language model, known by shapes alone.

    Attributes:
      calls: calls the model.
      params: the shapes of its leaves, in the compute dtype.
      model_state: the shapes of its other collections.
      cache_dtype: the dtype of floating arrays in its cache; None takes the model's own.
    """

    calls: ModelCalls
    params: Tree
    model_state: Tree
    cache_dtype: Any = None

    @staticmethod
    def of(step: Step, stored: StoredModel, cache_dtype: Any = None) -> LanguageModel:
        """Return the model that a step trains.

        Args:
          step: the step of a flax module, which has seen a batch.
          stored: how the step's state stores the leaves.
          cache_dtype: the dtype of the cache; None takes the compute dtype.

        Raises:
          ValueError: the step trains a pair of functions.
        """
        state, dtype = step.shapes(), step.config.compute_dtype
        naturals = [
            jax.ShapeDtypeStruct(p.shape, x.dtype)
            for p, x in zip(stored.placements, jax.tree.leaves(state.params), strict=True)
        ]
        return LanguageModel(
            calls=ModelCalls.of(step.adapted.base or step.adapted),
            params=stored.leaves(dtype, stored.tree.unflatten(naturals)),
            model_state=shapes_of(state.model_state),
            cache_dtype=jnp.dtype(cache_dtype or dtype),
        )

    @property
    def vocabulary(self) -> int:
        """The number of different tokens: the last dim of the logits."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        return jax.eval_shape(self.calls.forward, self.params, self.model_state, tokens).shape[-1]

    def plan(self, parts: int) -> TensorPlan:
        """Choose a layout for every way of calling the model, and prove it on a small instance.

        Args:
          parts: the number of devices over which leaves are split.

        Raises:
          ValueError: the model has heads, and `parts` does not divide their number.
        """
        # In float32: the proof is about sums, not about rounding in the compute dtype.
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), self.params)
        exact = dataclasses.replace(self, params=wide, cache_dtype=jnp.dtype(jnp.float32))
        refused: set[str] = set()
        while True:
            leaves = leaf_dims(self.params)
            programs = exact._samples(leaves)
            found = make_tensor_plan(programs, leaves, self._paths(), parts, refused)
            # The first program is enough: the other calls use the leaves in the same way.
            wrong = prove(programs[0], leaves, parts) if parts > 1 else set()
            if not wrong:
                return found
            refused |= wrong

    def forward(self, found: TensorPlan, rows: int, length: int) -> PartProgram:
        """Return the program `(params, {}, model_state, tokens) -> (logits, {})` of whole rows.

        Args:
          found: the plan.
          rows, length: the shape of the tokens.

        Raises:
          ValueError: rows of this length need a dim whole that the plan splits.
        """
        program = self._forward(self._planned(found), rows, length)
        check_split(program)
        return program

    def cached(self, found: TensorPlan, rows: int, length: int, num_tokens: int) -> PartProgram:
        """Return the program that reads the next tokens of each row with a cache.

        It computes `(params, cache, model_state, tokens, positions, mask) -> (logits, cache)`.

        Args:
          found: the plan.
          rows, length: the number of rows, and of the cache's places for each.
          num_tokens: the number of tokens that each row reads.

        Raises:
          ValueError: a cache of this length needs a dim whole that the plan splits.
        """
        program = self._cached(self._planned(found), rows, length, num_tokens)
        check_split(program)
        return program

    def _planned(self, found: TensorPlan) -> list:
        return [planned_dims(row.shape, row.dim, row.factors) for row in found.rows]

    def _paths(self) -> list[str]:
        return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.params)]

    def _samples(self, leaves: list) -> list[PartProgram]:
        """Return a program for each way of calling the model: with a cache first, if it has one."""
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


def check_split(program: PartProgram) -> None:
    """Check that a program needs no dim whole that the plan splits.

    Raises:
      ValueError: it needs one, though the programs that the plan was made for do not.
    """
    if (found := program.needed_whole()) is not None:
        size, why = found
        raise ValueError(
            f"a dim of {size} is split over `tensor`, and for other lengths of prompts the model "
            f"needs it whole: {why}; use tensor=1"
        )


def plan_shortcomings(plan: TensorPlan) -> list[str]:
    """Return warnings about leaves that a user would expect to be split and that are whole."""
    if plan.parts == 1:
        return []
    found = []
    if all(row.dim is None for row in plan.rows):
        found.append(
            f"tensor={plan.parts} splits none of the model's leaves, and each device holds all of "
            "them; print(engine.plan) says why"
        )
    if plan.refused:
        found.append(
            f"tensor={plan.parts}: each device holds {', '.join(plan.refused)} whole, since a "
            "small model with them split computed something else; that is a mistake of zeroxla: "
            "please report the model"
        )
    return found
