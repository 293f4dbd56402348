"""A function of a model's leaves, traced once and then run on parts of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.split.atoms import Dims, atoms_in, block, dims_of, expand, pieces_of
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.run_parts import PartsRunner
from zeroxla.split.split_axis import SplitAxis


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartProgram:
    """Runs `function(params, carry, *others) -> (result, carry)` on parts of params and carry.

    The carry holds the arrays that the caller keeps from call to call, if any; it stays in parts.

    Attributes:
      flow: the traced function, and the dims of its values.
      carry: the tree structure of the carry, and the number of its arrays.
      results: the tree structure of the result, and the number of its arrays.
      num_leaves: the number of leaves of params.
    """

    flow: DimsFlow
    carry: tuple[Any, int]
    results: tuple[Any, int]
    num_leaves: int

    @staticmethod
    def of(
        function: Callable[..., tuple[Any, Any]],
        leaves: Sequence[Dims],
        params: Any,
        carry: Any,
        *others: Any,
        num_whole: int = 0,
    ) -> PartProgram:
        """Trace a function.

        Args:
          function: (params, carry, *others) -> (result, carry).
          leaves: the dims of the leaves of `params`.
          params, carry, *others: pytrees of whole arrays, or of their shapes.
          num_whole: the number of arrays at the end of which no dim may be split, such as tokens:
            rows have any length, and a plan is made for all of them.
        """
        program, tree = trace(function, params, carry, *others, opened=compat.forward_jaxpr)
        result_tree, carry_tree = tree.children()
        flow = DimsFlow.of(program, leaves)
        for value in program.inputs[len(program.inputs) - num_whole :]:
            for dim in flow.dims[value]:
                block(dim, _ANY_LENGTH)
        _block_beside_rows(flow)
        return PartProgram(
            flow=flow,
            carry=(jax.tree.structure(carry), carry_tree.num_leaves),
            results=(result_tree, result_tree.num_leaves),
            num_leaves=len(leaves),
        )

    def result_dims(self) -> list[Dims]:
        """Return the dims of the result's arrays, the carry aside."""
        return self.flow.outputs()[: self.results[1]]

    def carry_shapes(self, axis: SplitAxis) -> Any:
        """Return the shapes and dtypes of one device's part of the carry."""
        tree, num = self.carry
        values = self.flow.program.inputs[self.num_leaves :][:num]
        return tree.unflatten(
            jax.ShapeDtypeStruct(tuple(map(axis.dim_size, self.flow.dims[v])), v.aval.dtype)
            for v in values
        )

    def carry_parts(self, axis: SplitAxis, carry: Any) -> Any:
        """Return one device's part of a carry that the device has whole."""
        tree, num = self.carry
        values = self.flow.program.inputs[self.num_leaves :][:num]
        pairs = zip(tree.flatten_up_to(carry), values, strict=True)
        return tree.unflatten(axis.take(x, self.flow.dims[v]) for x, v in pairs)

    def needed_whole(self) -> tuple[int, str] | None:
        """Return the size of a split dim that this function needs whole, and the reason.

        Returns None if there is no such dim. There is none in the functions that a plan was made
        for, but a function of other shapes may have one.
        """
        for atoms in self.flow.atoms():
            chosen = [atom for atom in atoms if atom.chosen]
            for atom in chosen:
                if atom.needed_whole or len(chosen) > 1:
                    why = "; ".join(atom.needed_whole) or "another split dim is in the same array"
                    return atom.size, why
        return None

    def __call__(
        self, axis: SplitAxis, leaves: Sequence[jax.Array], carry: Any, *others: Any
    ) -> tuple[Any, Any]:
        """Run on this device's parts of leaves and carry, and on the other arguments whole.

        Returns:
          The whole result, and this device's part of the carry.
        """
        inputs = self.flow.program.inputs[self.num_leaves + self.carry[1] :]
        taken = [
            axis.take(x, self.flow.dims[v])
            for x, v in zip(jax.tree.leaves(others), inputs, strict=True)
        ]
        program = self.flow.program
        kept = program.outputs[self.results[1] :]
        in_place = dict(zip(kept, program.inputs[self.num_leaves :], strict=False))
        outputs = PartsRunner(self.flow, axis, in_place)([*leaves, *jax.tree.leaves(carry), *taken])
        tree, num = self.results
        whole = [axis.collect(x, d) for x, d in zip(outputs[:num], self.result_dims())]
        return tree.unflatten(whole), self.carry[0].unflatten(outputs[num:])


_ANY_LENGTH = "rows may have any length"


def _block_beside_rows(flow: DimsFlow) -> None:
    """Block what is left of a dim that a slice as long as a row was taken of: rows of another
    length leave something else."""
    cut = [atom for dim in flow.all_dims() for atom in expand(dim) if pieces_of(atom)]
    while True:
        before = len(cut)
        for atom in tuple(cut):
            if any(_ANY_LENGTH in inner.blocked for inner in atoms_in((atom,))):
                block((atom,), _ANY_LENGTH)
                cut.remove(atom)
        if len(cut) == before:
            return


def leaf_dims(params: Any) -> list[Dims]:
    """Return new dims for each leaf of `params`; nothing is known about them."""
    return [dims_of(x.shape) for x in jax.tree.leaves(params)]
