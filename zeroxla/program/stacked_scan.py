"""Finds the operands of a `scan` that are stacked leaves, which the loop slices layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.program import compat
from zeroxla.program.primitives import CASTS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value, flatten_behind


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """An operand of a scan that follows from a stacked leaf.

    Attributes:
      leaf: the leaf, with all its layers.
      layer_dim: the dim of `leaf` along which the scan slices it.
      equations: the casts and transposes between leaf and operand, in order.
    """

    leaf: Value
    layer_dim: int
    equations: tuple[Equation, ...]

    def dim_in_slice(self, dim: int | None) -> int | None:
        """Return the number that the leaf's `dim` has in one layer; `layer_dim` itself is gone."""
        return None if dim is None else dim - (dim > self.layer_dim)


def find_stacked(
    operand: Operand, known: Mapping[Value, Equation], split_dims: Mapping[Value, int | None]
) -> Stacked | None:
    """Follow an operand of a scan back to a leaf, through casts and transposes.

    Args:
      operand: one of the scan's `xs`.
      known: the equation that makes each value that follows from leaves and constants alone.
      split_dims: for each leaf, the dim along which its storage is split; None if it is not split.

    Returns:
      None if the operand does not follow from a leaf in this way. Also None if the leaf is split
      along the layer dim: then each layer lies on some devices only, and the leaf must be gathered
      whole.
    """
    equations: list[Equation] = []
    dim = 0
    while isinstance(operand, Value) and operand in known:
        eq = known[operand]
        if eq.name == "transpose":
            dim = eq.params["permutation"][dim]
        elif eq.name not in CASTS:
            return None
        equations.append(eq)
        operand = eq.inputs[0]
    if not isinstance(operand, Value) or operand not in split_dims or split_dims[operand] == dim:
        return None
    return Stacked(operand, dim, tuple(reversed(equations)))


def loop_body(scan: Scan, chains: Mapping[int, Stacked]) -> tuple[Program, dict[int, Value]]:
    """Return the body of a scan that slices the leaves themselves, not what follows from them.

    Args:
      scan: the scan.
      chains: the operands that follow from leaves, by their position among all operands.

    Returns:
      The body, in which each of these inputs is one layer of the leaf; and these inputs, by their
      position.
    """
    invars = compat.open_jaxpr(scan.jaxpr)[0].invars
    inputs = [Value(v.aval) for v in invars]
    args: list[Operand] = list(inputs)
    leaves: dict[int, Value] = {}
    first: list[Equation] = []
    for i, chain in chains.items():
        dim, aval = chain.layer_dim, chain.leaf.aval
        shape = aval.shape[:dim] + aval.shape[dim + 1 :]
        leaves[i] = inputs[i] = Value(compat.array_type(shape, aval.dtype))
        args[i] = inputs[i]
        for stacked in chain.equations:
            sliced, dim = _on_one_layer(stacked, args[i], dim)
            first.append(sliced)
            args[i] = sliced.outputs[0]
    return flatten_behind(scan.jaxpr, inputs, first, args), leaves


def _on_one_layer(eq: Equation, operand: Operand, dim: int) -> tuple[Equation, int]:
    """Return the equation that does to one layer what `eq` does to all layers at once.

    Args:
      eq: a cast or a transpose of all layers.
      operand: the operand's one layer.
      dim: the layer dim of the operand of `eq`.

    Returns:
      The equation, and the layer dim of the result of `eq`.
    """
    source, after = eq.source, dim
    if eq.name == "transpose":
        permutation = eq.params["permutation"]
        after = permutation.index(dim)
        rest = tuple(d - (d > dim) for d in permutation if d != dim)
        source = source.replace(params={**source.params, "permutation": rest})
    aval = eq.outputs[0].aval
    shape = aval.shape[:after] + aval.shape[after + 1 :]
    output = Value(compat.array_type(shape, aval.dtype))
    return Equation(source, eq.name_stack, (operand,), (output,)), after
