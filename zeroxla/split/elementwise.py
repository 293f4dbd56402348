"""Rules of equations that work element by element, or along some of their dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax

from zeroxla.program.primitives import ELEMENTWISE, REDUCTIONS
from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, atoms_in, block, dim_in_pieces, is_split
from zeroxla.split.joins import MOST_PIECES
from zeroxla.split.rules import (
    Args,
    Connect,
    DimsOf,
    Rule,
    bind,
    fresh,
    run_sum,
    same,
    shape_of,
)
from zeroxla.split.split_axis import SplitAxis


def _connect_elementwise(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out, shape = fresh(eq.outputs[0]), eq.outputs[0].aval.shape
    for operand, dims in zip(eq.inputs, ins, strict=True):
        sizes = shape_of(operand)
        if len(sizes) == len(shape):  # Scalars and dims of size 1 are broadcast.
            for i in range(len(shape)):
                if sizes[i] == shape[i]:
                    same(eq, out[i], dims[i])
    return [out] * len(eq.outputs)


def _connect_in_pairs(eq: Equation, ins: list[Dims]) -> list[Dims]:
    return ins


def _along(dims_of: Callable[[Equation], Sequence[int]]) -> Connect:
    """Return the `connect` of equations that go through some dims.

    They do the same for each element of the other dims. Their results have the dims that they go
    through, like a sort's, or not, like a sum's.

    Args:
      dims_of: (equation) -> the numbers of the dims that it goes through.
    """

    def connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
        rank = len(ins[0])
        through = {d % rank for d in dims_of(eq)}
        others = [i for i in range(rank) if i not in through]
        outs = [list(fresh(v)) for v in eq.outputs]
        for dims in (*ins, *(out for out in outs if len(out) == rank)):
            for i in through:
                block(dims[i], f"{eq.name} goes through it")
        for dims in ins:
            for out in outs:
                for place, i in enumerate(others):
                    same(eq, out[i if len(out) == rank else place], dims[i])
        return [tuple(out) for out in outs]

    return connect


def _connect_reduction(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join the dims that stay. A sum over parts is completed, and so is a maximum."""
    (dims,), axes = ins, eq.params["axes"]
    for i in axes:
        for atom in atoms_in(dims[i]):
            atom.reduced[f"{eq.name} goes through it"] = None
            if eq.name == "reduce_sum":
                atom.sums.append(math.prod(eq.outputs[0].aval.shape))
            else:
                atom.is_compared = True
    return [tuple(dim for i, dim in enumerate(dims) if i not in axes)]


def _run_reduction(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    (whole,), (part,) = (dims[x] for x in eq.inputs), args
    split = {d: whole[d] for d in eq.params["axes"] if is_split(whole[d])}
    if split and eq.name == "reduce_sum":
        return run_sum(axis, eq, args, split)
    (found,) = bind(eq, (part,))
    return bind(eq, (axis.gathered(found),), axes=(0,)) if split else [found]


def _connect_concatenate(eq: Equation, ins: list[Dims]) -> list[Dims]:
    out, along = list(fresh(eq.outputs[0])), eq.params["dimension"]
    for dims in ins:
        for i, dim in enumerate(dims):
            if i != along:
                same(eq, out[i], dim)
    pieces = [dims[along] for x, dims in zip(eq.inputs, ins, strict=True) if shape_of(x)[along]]
    if 0 < len(pieces) <= MOST_PIECES:
        out[along] = dim_in_pieces(pieces)
    else:
        for dim in (*pieces, out[along]):
            block(dim, "concatenate makes it of several")
    return [tuple(out)]


def _connect_stack(eq: Equation, ins: list[Dims]) -> list[Dims]:
    (out,) = (list(fresh(v)) for v in eq.outputs)
    new = eq.params["axis"] % len(out)
    block(out[new], "stack makes it of several")
    for dims in ins:
        for i, dim in enumerate(dims):
            same(eq, out[i + (i >= new)], dim)
    return [tuple(out)]


_ALONG_AXIS = Rule(_along(lambda eq: (eq.params["axis"],)))

ELEMENTWISE_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, Rule(_connect_elementwise)),
    **dict.fromkeys(REDUCTIONS, Rule(_along(lambda eq: eq.params["axes"]))),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min"), Rule(_connect_reduction, _run_reduction)
    ),
    "unstack": _ALONG_AXIS,
    "sort": Rule(_along(lambda eq: (eq.params["dimension"],))),
    "rev": Rule(_along(lambda eq: eq.params["dimensions"])),
    "optimization_barrier": Rule(_connect_in_pairs),
    "concatenate": Rule(_connect_concatenate),
    "stack": Rule(_connect_stack),
}
