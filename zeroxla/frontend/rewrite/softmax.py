"""Finds a softmax in the equations that it is written with.

Softmax does not change if all elements of a row are shifted alike. So whatever a model subtracts
from a row before it takes exponentials, its maximum in most cases, is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from zeroxla.frontend.rewrite.cut_dims import shape_of
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program.primitives import ARRANGEMENTS, CASTS, ELEMENTWISE, PASSED
from zeroxla.program.trace import Constant, Equation, Operand, Value, is_float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Softmax:
    """A softmax along one dim.

    Attributes:
      scores: what exponentials are taken of.
      result: the probabilities, in the shape of the scores.
      keep: what is kept: an operand of bool, and the value that it has where the exponential
        counts; None if all are.
      inside: the equations between the scores and the result.
      empty_is_zero: whether a row of which nothing is kept has probabilities of zero; otherwise
        they are NaN.
    """

    scores: Value
    result: Value
    keep: tuple[Operand, bool] | None
    inside: frozenset[Equation]
    empty_is_zero: bool


def find_softmax(scope: TracedScope, operand: Operand, dim: int) -> Softmax | None:
    """Return the softmax along a dim that an operand is the result of; None if it is of none."""
    result = scope.resolve(operand)
    if not isinstance(result, Value) or not result.is_float:
        return None
    eq = scope.producer(stripped(scope, result))
    if eq is None or not scope.is_own(eq):
        return None
    found: tuple[Operand, tuple[Operand, bool] | None] | None = None
    if eq.name in ("div", "mul"):
        for weights, total in quotients_of(scope, eq):
            if found is None and is_equal_in_rows(scope, total, dim):
                found = _of_quotient(scope, weights, total, dim)
    elif eq.name == "select_n":
        found = _of_kept_quotient(scope, eq, dim)
    elif eq.name == "exp":
        found = _of_logarithm(scope, eq.inputs[0], dim)
    if found is None:
        return None
    scores, keep = found
    if not isinstance(scores, Value) or shape_of(scores) != shape_of(result):
        return None
    inside = between(scope, scores, result)
    return Softmax(
        scores=scores,
        result=result,
        keep=keep,
        inside=inside,
        empty_is_zero=eq.name == "select_n",
    )


def softmax_of_weights(
    scope: TracedScope, operand: Operand, total: Operand, dim: int
) -> Softmax | None:
    """Return the softmax that an operand is before it is divided by its sum along a dim.

    Args:
      scope: where equations are found.
      operand: the exponentials.
      total: what is divided by, in any shape.
      dim: the operand's dim that is summed over.
    """
    weights = scope.resolve(operand)
    found = _of_quotient(scope, weights, total, dim)
    if found is None or not isinstance(weights, Value):
        return None
    scores, keep = found
    if not isinstance(scores, Value) or shape_of(scores) != shape_of(weights):
        return None
    inside = between(scope, scores, weights)
    return Softmax(scores=scores, result=weights, keep=keep, inside=inside, empty_is_zero=False)


def quotients_of(scope: TracedScope, eq: Equation) -> Iterator[tuple[Operand, Operand]]:
    """Yield the numerator and the denominator of a `div`, or of a `mul` by one over something."""
    if eq.name == "div":
        yield eq.inputs[0], eq.inputs[1]
        return
    for numerator, factor in (eq.inputs, eq.inputs[::-1]):
        total = _inverse(scope, factor)
        if total is not None:
            yield numerator, total


def stripped(scope: TracedScope, operand: Operand) -> Operand:
    """Follow an operand through casts between floating dtypes, and names."""
    operand = scope.resolve(operand)
    while True:
        eq = scope.producer(operand)
        if eq is None or eq.name not in PASSED:
            return operand
        below = scope.resolve(eq.inputs[0])
        if not is_float(below.value.dtype if isinstance(below, Constant) else below.aval.dtype):
            return operand
        operand = below


def filled_with(scope: TracedScope, operand: Operand) -> float | None:
    """Return the number that all elements of an operand are; None if that is not known."""
    operand = scope.resolve(operand)
    while not isinstance(operand, Constant):
        eq = scope.producer(operand)
        if eq is None or eq.name not in ARRANGEMENTS | CASTS:
            return None
        operand = scope.resolve(eq.inputs[0])
    if np.size(operand.value) != 1 or not hasattr(np.asarray(operand.value), "item"):
        return None
    try:
        return float(np.asarray(operand.value).astype(np.float64).item())
    except (TypeError, ValueError):  # a random key
        return None


def between(scope: TracedScope, first: Value, last: Value) -> frozenset[Equation]:
    """Return the equations that compute one value from another one."""
    after: set[Operand] = {first}
    following: list[Equation] = []
    for eq in scope.equations:
        if any(scope.resolve(x) in after for x in eq.values):
            following.append(eq)
            after.update(eq.outputs)
    needed: set[Operand] = {last}
    found: set[Equation] = set()
    for eq in reversed(following):
        if not needed.isdisjoint(eq.outputs):
            found.add(eq)
            needed.update(x for v in eq.values if (x := scope.resolve(v)) is not first)
    return frozenset(found)


def is_equal_in_rows(scope: TracedScope, operand: Operand, dim: int) -> bool:
    """Return whether all elements of an operand along a dim are known to be equal."""
    stack, seen = [scope.resolve(operand)], set[Operand]()
    while stack:
        x = stack.pop()
        if x in seen or not shape_of(x) or shape_of(x)[dim] == 1:
            continue
        seen.add(x)
        eq = scope.producer(x)
        if eq is None:
            return False
        if eq.name == "broadcast_in_dim":
            dims = list(eq.params["broadcast_dimensions"])
            if dim in dims and shape_of(eq.inputs[0])[dims.index(dim)] > 1:
                return False
        elif eq.name in ELEMENTWISE:
            stack += map(scope.resolve, eq.inputs)
        else:
            return False
    return True


def _of_quotient(
    scope: TracedScope, weights: Operand, total: Operand, dim: int
) -> tuple[Operand, tuple[Operand, bool] | None] | None:
    """Return the scores and what is kept of `weights / total`; None if it is no softmax."""
    summed = _summed(scope, total, dim)
    if summed is None or stripped(scope, summed) is not stripped(scope, weights):
        return None
    eq, keep = scope.producer(stripped(scope, weights)), None
    kept = None if eq is None else _kept(scope, eq)
    if kept is not None:
        keep, eq = kept[1], scope.producer(stripped(scope, kept[0]))
    if eq is None or eq.name != "exp":
        return None
    return _unshifted(scope, eq.inputs[0], dim), keep


def _of_kept_quotient(
    scope: TracedScope, eq: Equation, dim: int
) -> tuple[Operand, tuple[Operand, bool]] | None:
    """Return the same of weights over the sum of those that are kept, where they are kept, as
    JAX's softmax with `where` has it."""
    kept = _kept(scope, eq)
    quotient = None if kept is None else scope.producer(stripped(scope, kept[0]))
    if kept is None or quotient is None or quotient.name != "div":
        return None
    weights, total = quotient.inputs
    summed = _summed(scope, total, dim) if is_equal_in_rows(scope, total, dim) else None
    exponential = scope.producer(stripped(scope, weights))
    addends = None if summed is None else scope.producer(stripped(scope, summed))
    if exponential is None or exponential.name != "exp" or addends is None:
        return None
    added = _kept(scope, addends)
    if added is None or stripped(scope, added[0]) is not stripped(scope, weights):
        return None
    if _same_condition(scope, added[1][0]) is not _same_condition(scope, kept[1][0]):
        return None
    if added[1][1] is not kept[1][1]:
        return None
    return _unshifted(scope, exponential.inputs[0], dim), kept[1]


def _kept(scope: TracedScope, eq: Equation) -> tuple[Operand, tuple[Operand, bool]] | None:
    """Return what an equation keeps beside zeros, the condition, and the condition's value where it
    is kept."""
    if eq.name != "select_n" or len(eq.inputs) != 3:
        return None
    which, of_false, of_true = eq.inputs
    for chosen, other, value in ((of_true, of_false, True), (of_false, of_true, False)):
        if filled_with(scope, other) == 0:
            return chosen, (which, value)
    return None


def _same_condition(scope: TracedScope, operand: Operand) -> Operand:
    """Follow a condition to what it is a broadcast of: two of them may be of one mask."""
    operand = scope.resolve(operand)
    while (eq := scope.producer(operand)) is not None and eq.name == "broadcast_in_dim":
        operand = scope.resolve(eq.inputs[0])
    return operand


def _of_logarithm(scope: TracedScope, operand: Operand, dim: int) -> tuple[Operand, None] | None:
    """Return the scores of exp(scores - log of the sum of exponentials); None if it is none.

    That both are of the same scores, the trial on a small instance shows.
    """
    operand = stripped(scope, operand)
    eq = scope.producer(operand)
    if eq is None or eq.name != "sub" or not is_equal_in_rows(scope, eq.inputs[1], dim):
        return None
    scores = _unshifted(scope, operand, dim)
    if not isinstance(scores, Value) or not isinstance(operand, Value):
        return None
    inside = between(scope, scores, operand)
    has_sum = any(eq.name == "reduce_sum" and tuple(eq.params["axes"]) == (dim,) for eq in inside)
    return (scores, None) if has_sum and any(eq.name == "log" for eq in inside) else None


def _unshifted(scope: TracedScope, operand: Operand, dim: int) -> Operand:
    """Follow an operand through subtractions of what is equal in rows."""
    operand = scope.resolve(operand)
    while True:
        eq = scope.producer(operand)
        if eq is None or eq.name != "sub" or not is_equal_in_rows(scope, eq.inputs[1], dim):
            return operand
        operand = scope.resolve(eq.inputs[0])


def _summed(scope: TracedScope, operand: Operand, dim: int) -> Operand | None:
    """Return what an operand is the sum of, along a dim."""
    eq = scope.producer(stripped(scope, operand))
    while eq is not None and eq.name in ARRANGEMENTS:
        eq = scope.producer(stripped(scope, eq.inputs[0]))
    if eq is None or eq.name != "reduce_sum" or tuple(eq.params["axes"]) != (dim,):
        return None
    return eq.inputs[0]


def _inverse(scope: TracedScope, operand: Operand) -> Operand | None:
    """Return what an operand is one over."""
    eq = scope.producer(stripped(scope, operand))
    while eq is not None and eq.name in ARRANGEMENTS:
        eq = scope.producer(stripped(scope, eq.inputs[0]))
    return None if eq is None else _one_over(scope, eq)


def _one_over(scope: TracedScope, eq: Equation) -> Operand | None:
    if eq.name == "div" and filled_with(scope, eq.inputs[0]) == 1:
        return eq.inputs[1]
    if eq.name == "integer_pow" and eq.params["y"] == -1:
        return eq.inputs[0]
    return None
