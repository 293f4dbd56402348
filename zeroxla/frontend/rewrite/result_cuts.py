"""Which part of an equation's result is computed from parts of its operands: `cuts`, forward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts, reshaped
from zeroxla.frontend.rewrite.cuts import operand_cuts
from zeroxla.program.trace import Equation, Operand, Value

MOST_DIMS = 7
"""Results of more dims have no rule: all their dims would be tried."""


def result_cuts(eq: Equation, known: Mapping[Value, Cuts], labels: Sequence[str]) -> Cuts | None:
    """Return the cuts of a result whose operands are cut; None if there is no rule.

    Each possible place of the labels is tried: the first from which the operands' cuts follow as
    they are known is taken.

    Args:
      eq: the equation.
      known: the cuts of operands; those without are not cut.
      labels: the labels that they have.
    """
    if len(eq.outputs) != 1 or eq.is_pinned or len(eq.outputs[0].aval.shape) > MOST_DIMS:
        return None

    def hint(operand: Operand) -> Cuts | None:
        return known.get(operand) if isinstance(operand, Value) else None

    for cuts in _candidates(eq, known, labels):
        found = operand_cuts(eq, cuts, hint)
        if found is None:
            continue
        pairs = list(zip(eq.inputs, found, strict=True))
        given = [(known[x], own) for x, own in pairs if isinstance(x, Value) and x in known]
        if all(a == b for a, b in given):
            return cuts
    return None


def _candidates(eq: Equation, known: Mapping[Value, Cuts], labels: Sequence[str]) -> Iterator[Cuts]:
    """Yield cuts that a result may have: each label in a dim of the size that it has in an operand,
    or in none."""
    shape = eq.outputs[0].aval.shape
    cut_values = [x for x in eq.values if x in known]
    if eq.name == "reshape" and cut_values:
        found = reshaped(known[cut_values[0]], cut_values[0].aval.shape, shape)
        if found is not None:
            yield found
        return
    starts = eq.params["start_indices"] if eq.name == "slice" else (0,) * len(shape)

    def may_be(label: str) -> Iterator[tuple[int, Cut] | None]:
        seen = {
            (cut, None if eq.name == "slice" else n)
            for x in cut_values
            for cut, n in zip(known[x], x.aval.shape, strict=True)
            if cut is not None and cut.label == label
        }
        for d, n in enumerate(shape):
            for cut, size in sorted(seen):
                if size in (n, None):
                    yield d, cut._replace(first=cut.first - starts[d])
        yield None

    for found in itertools.product(*map(may_be, labels)):
        dims = [x[0] for x in found if x is not None]
        if len(dims) == len(set(dims)):
            by_dim = dict(x for x in found if x is not None)
            yield tuple(by_dim.get(d) for d in range(len(shape)))
