"""A function of a model's leaves, traced once, to be run on parts of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split.atoms import Dims, dim_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.run_parts import PartsRunner, Sharing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartProgram:
    """`function(params, cache, *others) -> (result, cache)` on parts of params and cache.

    Attributes:
      flow: the traced function, and what its dims have to do with each other.
      cache: the tree and the number of what is kept from call to call.
      results: the tree and the number of what is returned.
      num_leaves: of params.
    """

    flow: DimsFlow
    cache: tuple[Any, int]
    results: tuple[Any, int]
    num_leaves: int

    @staticmethod
    def of(
        function: Callable[..., tuple[Any, Any]],
        leaves: Sequence[Dims],
        params: Any,
        cache: Any,
        *others: Any,
    ) -> PartProgram:
        """Trace a function.

        Args:
          function: see above.
          leaves: dims of the leaves of `params`.
          params, cache, *others: pytrees of arrays or shapes, whole.
        """
        program, tree = trace(function, params, cache, *others, opened=compat.forward_jaxpr)
        result_tree, kept_tree = tree.children()
        return PartProgram(
            flow=DimsFlow.of(program, leaves),
            cache=(jax.tree.structure(cache), kept_tree.num_leaves),
            results=(result_tree, result_tree.num_leaves),
            num_leaves=len(leaves),
        )

    def result_dims(self) -> list[Dims]:
        """Return the dims of what is returned, the cache aside."""
        return self.flow.outputs()[: self.results[1]]

    def cache_shapes(self, sharing: Sharing) -> Any:
        """Return the shapes of one device's part of the cache."""
        tree, num = self.cache
        values = self.flow.program.inputs[self.num_leaves :][:num]
        return tree.unflatten(
            jax.ShapeDtypeStruct(tuple(map(sharing.part, self.flow.dims[v])), v.aval.dtype)
            for v in values
        )

    def check(self) -> None:
        """Check that what is split may be.

        Raises:
          ValueError: the function needs a split dim whole, as none of those did that the plan was
            made for.
        """
        for atoms in self.flow.atoms():
            chosen = [atom for atom in atoms if atom.chosen]
            for atom in chosen:
                if atom.blocked or len(chosen) > 1:
                    why = "; ".join(atom.blocked) or "another split dim is in the same array"
                    raise ValueError(
                        f"a dim of {atom.size} is split over `tensor`, and for other lengths of "
                        f"prompts the model needs it whole: {why}; use tensor=1"
                    )

    def __call__(
        self, sharing: Sharing, leaves: Sequence[jax.Array], cache: Any, *others: Any
    ) -> tuple[Any, Any]:
        """Run on parts of leaves and cache, and on the others whole.

        Returns:
          The result, whole, and the part of the cache.
        """
        inputs = self.flow.program.inputs[self.num_leaves + self.cache[1] :]
        taken = [
            sharing.take(x, self.flow.dims[v])
            for x, v in zip(jax.tree.leaves(others), inputs, strict=True)
        ]
        program = self.flow.program
        kept = program.outputs[self.results[1] :]
        in_place = dict(zip(kept, program.inputs[self.num_leaves :], strict=False))
        outputs = PartsRunner(self.flow, sharing, in_place)(
            [*leaves, *jax.tree.leaves(cache), *taken]
        )
        tree, num = self.results
        whole = [sharing.collect(x, d) for x, d in zip(outputs[:num], self.result_dims())]
        return tree.unflatten(whole), self.cache[0].unflatten(outputs[num:])


def leaf_dims(params: Any) -> list[Dims]:
    """Return dims of leaves, of which nothing is known."""
    return [tuple(map(dim_of, x.shape)) for x in jax.tree.leaves(params)]
