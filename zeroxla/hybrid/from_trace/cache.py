"""`TracedCache`: reads one token of each row at a time, with what a pass over whole rows needs of
the earlier ones.

Shape letters: B rows, M places, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.frontend.base import Tree
from zeroxla.hybrid.from_trace.cutter import AnyEquation
from zeroxla.hybrid.from_trace.places import Along, ForbiddenError, PlaceAxis
from zeroxla.hybrid.from_trace.plan import PlacePlan, follow_places, plan_places
from zeroxla.hybrid.from_trace.run import Forms, Outputs
from zeroxla.program import compat
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import trace

Forward = Callable[[Tree, Tree, jax.Array], jax.Array]
"""(params, model state, tokens int32[B, L]) -> logits [B, L, V]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TracedCache:
    """The cache of a model that has none.

    All rows are at the same place. The cache is a list of arrays: each is what the pass over whole
    rows computes for all places (keys, values), or what a recurrence carries.

    Attributes:
      forward: computes logits of whole rows.
    """

    forward: Forward

    def plan(
        self, params: Tree, model_state: Tree, rows: int, places: int, dtype: Any = None
    ) -> PlacePlan:
        """Return how the logits at one place are computed.

        Args:
          params, model_state: the shapes of the model's leaves and other collections.
          rows, places: the shape of whole rows, [B, M].
          dtype: the dtype of floating arrays that are kept for all places; None keeps their own.

        Raises:
          ForbiddenError: an equation cannot be computed at one place, and the message names it; or
            the model takes no rows of so many places, as those that take one length alone.
        """
        args = params, model_state, jax.ShapeDtypeStruct((rows, places), jnp.int32)
        try:
            program, _ = trace(self.forward, *args, opened=compat.forward_jaxpr)
        except Exception as error:  # Whatever a model raises on rows that it does not take.
            why = f"the model takes no rows of {places} tokens: {type(error).__name__}: {error}"
            raise ForbiddenError(None, why) from error
        last, along, cutter = len(program.inputs) - 1, Along(1), AnyEquation(places, dtype)
        found = follow_places(program, [*[None] * last, frozenset({along})], cutter)
        return plan_places(program, found, {last: along}, {0: [along]}, cutter)

    def empty(
        self, params: Tree, model_state: Tree, rows: int, places: int, dtype: Any = None
    ) -> list[jax.Array]:
        """Return an empty cache. The arguments are those of `plan`."""
        states = self.plan(params, model_state, rows, places, dtype).states
        return [jnp.zeros(x.shape, x.dtype) for x in states]

    def read(
        self,
        params: Tree,
        model_state: Tree,
        cache: list[jax.Array],
        tokens_B1: jax.Array,
        place: jax.Array,
        places: int,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Read the next token of each row.

        Args:
          params, model_state: the model's leaves and other collections.
          cache: the cache of the tokens before.
          tokens_B1: the tokens, int32.
          place: their place, int32[], the same in all rows.
          places: the number of places, M.

        Returns:
          The logits [B, 1, V] and the cache that holds the tokens.

        Cost: what depends on a token alone is computed for one token; attention reads all places.
        """
        plan = self.plan(shapes_of(params), shapes_of(model_state), len(tokens_B1), places)
        along = Along(1)
        given: list[Forms] = [{None: x} for x in jax.tree.leaves((params, model_state))]
        axis = PlaceAxis(parts=places, part=place)
        outs = Outputs(plan, axis, [*given, {along: tokens_B1}], cache)
        return outs.get(plan.program.outputs[0], along), outs.states
