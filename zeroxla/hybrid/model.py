"""A language model in the tensor-parallel layout: the plan of the layout, and its programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend import Adapted
from zeroxla.frontend.base import Tree
from zeroxla.hybrid.calls import ModelCalls
from zeroxla.hybrid.find_calls import (
    NUM_ROWS,
    SHORTEST,
    CallOptions,
    find_calls,
    sample_places,
    several_tokens,
)
from zeroxla.hybrid.from_trace.places import ForbiddenError
from zeroxla.hybrid.reshard import StoredModel
from zeroxla.program.paths import leaf_path
from zeroxla.program.shapes import shapes_of
from zeroxla.split.part_program import PartProgram, leaf_dims
from zeroxla.split.proof import prove
from zeroxla.split.tensor_plan import TensorPlan, make_tensor_plan
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The programs of a model's calls, for short rows.

    Attributes:
      leaves: the dims of the leaves, which all programs share.
      forward: reads whole rows.
      several, one: read several tokens, and one, with a cache; None if the model does not.
    """

    leaves: list
    forward: PartProgram
    several: PartProgram | None = None
    one: PartProgram | None = None

    def programs(self) -> list[PartProgram]:
        """Return the programs; those with a cache first."""
        return [p for p in (self.several, self.one, self.forward) if p is not None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModel:
    """A language model, known by shapes alone.

    Attributes:
      calls: calls the model.
      params: the shapes of its leaves, in the compute dtype.
      model_state: the shapes of its other collections.
      sample_length: the length of the rows on which its call is traced.
      sample_places: the number of places of the cache with which it is traced.
      multiple: whole rows have a multiple of so many tokens.
      cache_dtype: the dtype of floating arrays in its cache.
    """

    calls: ModelCalls
    params: Tree
    model_state: Tree
    sample_length: int
    sample_places: int
    multiple: int = 1
    cache_dtype: Any = None

    @staticmethod
    def of(step: Step, stored: StoredModel, options: CallOptions | None = None) -> LanguageModel:
        """Return the model that a step trains.

        Args:
          step: the step of a flax module, which has seen a batch.
          stored: how the step's state stores the leaves.
          options: what the user says about the model's calls.

        Raises:
          ValueError: the step trains a pair of functions, or no call of its module returns logits.
        """
        state, dtype = step.shapes(), step.config.compute_dtype
        naturals = [
            jax.ShapeDtypeStruct(p.shape, x.dtype)
            for p, x in zip(stored.placements, jax.tree.leaves(state.params), strict=True)
        ]
        return LanguageModel.with_calls(
            step.adapted.base or step.adapted,
            stored.leaves(dtype, stored.tree.unflatten(naturals)),
            shapes_of(state.model_state),
            options or CallOptions(),
            dtype,
        )

    @staticmethod
    def with_calls(
        adapted: Adapted,
        params: Tree,
        model_state: Tree,
        options: CallOptions,
        dtype: Any = jnp.float32,
    ) -> LanguageModel:
        """Return a model together with its calls, which are found by tracing.

        Args:
          adapted: the model.
          params, model_state: the shapes of its leaves and of its other collections.
          options: what the user says about its calls.
          dtype: the dtype of its cache, if the user gives none.

        Raises:
          ValueError: see `find_calls`.
        """
        dtype = jnp.dtype(options.cache_dtype or dtype)
        calls, length = find_calls(adapted, params, model_state, dtype, options)
        usual = options.sample_length is None and length <= SHORTEST
        return LanguageModel(
            calls=calls,
            params=params,
            model_state=model_state,
            sample_length=length,
            sample_places=sample_places(length, options.limit or adapted.context),
            multiple=1 if usual else length,
            cache_dtype=dtype,
        )

    @property
    def vocabulary(self) -> int:
        """The number of different tokens: the last dim of the logits."""
        tokens = jax.ShapeDtypeStruct((1, self.sample_length), jnp.int32)
        return jax.eval_shape(self.calls.forward, self.params, self.model_state, tokens).shape[-1]

    def plan(self, parts: int) -> TensorPlan:
        """Choose a layout for every way of calling the model, and prove it on a small instance.

        Args:
          parts: the number of devices over which leaves are split.

        Raises:
          ValueError: the model has heads, and `parts` does not divide their number.
        """
        exact = self._exact()
        refused: set[str] = set()
        while True:
            leaves = leaf_dims(self.params)
            programs = exact._samples(leaves).programs()
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

    def empty_cache(self, rows: int, places: int) -> Any:
        """Return an empty cache, whole."""
        return self.calls.empty_cache(self.params, self.model_state, rows, places, self.cache_dtype)

    def no_cache_for(self, rows: int, places: int) -> str | None:
        """Return why rows of a shape are read without a cache; None if they are read with one."""
        how = self.calls.with_cache
        if how is None:
            return self.calls.no_cache
        try:
            if how.traced is not None:
                how.traced.plan(self.params, self.model_state, rows, places)
        except ForbiddenError as error:
            return f"the cache that is made from the model's trace has no {places} places ({error})"
        return None

    def whole_length(self, length: int) -> int:
        """Return the length of whole rows that hold so many tokens: the next multiple."""
        return -(-length // self.multiple) * self.multiple

    def _planned(self, found: TensorPlan) -> list:
        return [row.dims for row in found.rows]

    def _paths(self) -> list[str]:
        return [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.params)]

    def samples(self) -> Samples:
        """Return a program for each way of calling the model, in float32."""
        return self._exact()._samples(leaf_dims(self.params))

    def _exact(self) -> LanguageModel:
        """Return the model in float32: proofs are about sums, not about rounding in the compute
        dtype."""
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), self.params)
        return dataclasses.replace(self, params=wide, cache_dtype=jnp.dtype(jnp.float32))

    def _samples(self, leaves: list) -> Samples:
        forward = self._forward(leaves, NUM_ROWS, self.sample_length)
        how = self.calls.with_cache
        if how is None:
            return Samples(leaves=leaves, forward=forward)
        places = self.sample_places
        num = several_tokens(places)
        several = None if how.one_token else self._cached(leaves, NUM_ROWS, places, num)
        one = self._cached(leaves, NUM_ROWS, places, 1)
        return Samples(leaves=leaves, forward=forward, several=several, one=one)

    def _forward(self, leaves: list, rows: int, length: int) -> PartProgram:
        def function(params: Tree, cache: Tree, model_state: Tree, tokens: jax.Array) -> Any:
            return self.calls.forward(params, model_state, tokens), cache

        tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        others = (self.model_state, tokens)
        return PartProgram.of(function, leaves, self.params, {}, *others, num_whole=1)

    def _cached(self, leaves: list, rows: int, length: int, num_tokens: int) -> PartProgram:
        def function(
            params: Tree, cache: Tree, model_state: Tree, tokens: Any, positions: Any, mask: Any
        ) -> Any:
            return self.calls.cached(params, model_state, cache, tokens, positions, mask)

        cache = jax.eval_shape(lambda: self.empty_cache(rows, length))
        tokens = jax.ShapeDtypeStruct((rows, num_tokens), jnp.int32)
        mask = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        others = (self.model_state, tokens, tokens, mask)
        return PartProgram.of(function, leaves, self.params, cache, *others, num_whole=3)


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
