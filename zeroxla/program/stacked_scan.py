"""A `scan` over stacked leaves, seen from outside: which operands slice a leaf layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.program import compat
from zeroxla.program.trace import Atom, Equation, Program, Value, flatten_behind


@dataclasses.dataclass(frozen=True, slots=True)
class Stacked:
    """How an operand of a scan follows from a leaf.

    Attributes:
      leaf: the whole, stacked leaf.
      layer_dim: the dim of `leaf` along which the scan slices it.
      equations: from the leaf to the operand; each does the same to every layer.
    """

    leaf: Value
    layer_dim: int
    equations: tuple[Equation, ...]

    def dim_in_slice(self, dim: int | None) -> int | None:
        """Where the leaf's `dim` is in one layer."""
        return None if dim is None else dim - (dim > self.layer_dim)


def find_stacked(
    operand: Atom, known: Mapping[Value, Equation], split_dims: Mapping[Value, int | None]
) -> Stacked | None:
    """Follow an operand of a scan back to a leaf, through casts and transposes.

    Args:
      operand: one of the scan's `xs`.
      known: the parameter-only equations, by what they make.
      split_dims: the leaves, with the dim along which each is stored split.

    Returns:
      None if the operand is no leaf, or one that is split along the layer dim: then a layer lies on
      some devices only, and the stack must be gathered whole.
    """
    equations: list[Equation] = []
    dim = 0
    while isinstance(operand, Value) and operand in known:
        eq = known[operand]
        if eq.name == "transpose":
            dim = eq.params["permutation"][dim]
        elif eq.name not in ("convert_element_type", "copy"):
            return None
        equations.append(eq)
        operand = eq.inputs[0]
    if not isinstance(operand, Value) or operand not in split_dims or split_dims[operand] == dim:
        return None
    return Stacked(operand, dim, tuple(reversed(equations)))


def loop_body(eq: Equation, chains: Mapping[int, Stacked]) -> tuple[Program, dict[int, Value]]:
    """Return the body of a scan with raw leaves at the positions of `chains`, and those leaves."""
    invars = compat.open_jaxpr(eq.params["jaxpr"])[0].invars
    inputs = [Value(v.aval) for v in invars]
    args: list[Atom] = list(inputs)
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
    return flatten_behind(eq.params["jaxpr"], inputs, first, args), leaves


def _on_one_layer(eq: Equation, operand: Atom, dim: int) -> tuple[Equation, int]:
    """Return the equation that does to one layer what `eq` does to the stack, and where the layer
    dim is after it."""
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
