"""Finds norms and activation functions: what is computed element by element, or row by row, between
products.

Such a chain ends in one value, and nothing else of it is read. Its derivative would keep several
arrays of the chain; it needs no more than the chain's inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

import numpy as np

from zeroxla.frontend.rewrite.scope import CUSTOM_JVP, TracedScope
from zeroxla.program.primitives import CURVES, OF_CHAINS, OF_NORMS, SUMS
from zeroxla.program.trace import Equation, Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainSite:
    """A chain of equations.

    Attributes:
      kind: what it is.
      equations: its equations, in order.
      inputs: the values that it reads.
      result: the value that is read of it.
    """

    kind: Literal["norm", "activation"]
    equations: tuple[Equation, ...]
    inputs: tuple[Value, ...]
    result: Value


def find_chains(scope: TracedScope, taken: Collection[Equation]) -> list[ChainSite]:
    """Return the chains of a program, in order.

    Args:
      scope: the program.
      taken: equations that something else runs in the place of.
    """
    equations = scope.program.equations
    places = {eq: i for i, eq in enumerate(equations)}
    made_by = {v: eq for eq in equations for v in eq.outputs}
    used = set(taken)
    found: list[ChainSite] = []
    for last in reversed(equations):
        if last in used or not _is_cheap(last):
            continue
        chain = _cone(scope, last, made_by, used)
        _without_sums(chain, last, made_by)
        kind = _kind_of(chain, last)
        if kind is None:
            continue
        used |= chain
        ordered = tuple(sorted(chain, key=places.__getitem__))
        own = {v for eq in ordered for v in eq.outputs}
        inputs = dict.fromkeys(v for eq in ordered for v in eq.values if v not in own)
        found.append(
            ChainSite(kind=kind, equations=ordered, inputs=tuple(inputs), result=last.outputs[0])
        )
    return found[::-1]


def _cone(
    scope: TracedScope, last: Equation, made_by: dict[Value, Equation], used: Collection[Equation]
) -> set[Equation]:
    """Return the equations that only one equation's result is computed from, itself too."""
    chain = {last}
    stack = list(last.values)
    while stack:
        v = stack.pop()
        eq = made_by.get(v)
        if eq is None or eq in chain or eq in used or not _is_cheap(eq):
            continue
        if all(reader in chain for reader in scope.readers[v]):
            chain.add(eq)
            stack += [*eq.values, *(x for each in chain for x in each.values)]
    return chain


def _without_sums(chain: set[Equation], last: Equation, made_by: dict[Value, Equation]) -> None:
    """Take sums of two large inputs out of a chain: their result is one array, and they are two."""
    size = last.outputs[0].aval.size
    changed = True
    while changed:
        changed = False
        for eq in [eq for eq in chain if eq is not last and eq.name in SUMS]:
            large = [v for v in eq.values if v.aval.size >= size]
            if len(large) > 1 and all(made_by.get(v) not in chain for v in large):
                chain.remove(eq)
                changed = True


def _is_cheap(eq: Equation) -> bool:
    if len(eq.outputs) != 1 or eq.is_pinned:
        return False
    if eq.name == CUSTOM_JVP:  # such as relu
        shape = eq.outputs[0].aval.shape
        return all(v.aval.shape in (shape, ()) for v in eq.values)
    return eq.name in OF_CHAINS


def _kind_of(chain: Collection[Equation], last: Equation) -> Literal["norm", "activation"] | None:
    """Return what a chain is; None if it keeps no more than its inputs anyway, or is neither."""
    result = last.outputs[0]
    if not result.is_float or len(result.aval.shape) < 2 or len(chain) < 2:
        return None
    large = {eq.name for eq in chain if eq.outputs[0].aval.size >= result.aval.size}
    names = {eq.name for eq in chain}
    sums = [eq for eq in chain if eq.name == "reduce_sum"]
    if sums:
        if names & {"exp", "exp2"} or not names & OF_NORMS:
            return None
        widths = {int(np.prod([_shape(eq)[d] for d in eq.params["axes"]])) for eq in sums}
        return "norm" if len(widths) == 1 and large & {"mul", "div"} else None
    curved = large & CURVES or {"exp", "div"} <= large
    return "activation" if curved else None


def _shape(eq: Equation) -> tuple[int, ...]:
    return eq.values[0].aval.shape
