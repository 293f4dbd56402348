"""Finds logits that only numbers of positions are computed from, such as losses.

The search begins at a product of activations and a head, and follows its result forward: through
what has a number for each position and each word, until words are summed over or one of them is
looked up. Where all ends so, the logits need not exist at once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zeroxla.program.primitives import CONTRACTIONS
from zeroxla.program.trace import Equation, Operand, Value
from zeroxla.rewrite.cuts import Cut, Cuts, dot_dims, labels_of, operand_cuts, shape_of
from zeroxla.rewrite.recipe import Recipe
from zeroxla.rewrite.scope import TracedScope

POSITION, WORD = "position", "word"
LABELS = (POSITION, WORD)

MOST_DIMS = 5
"""Arrays of more dims are not followed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadSite:
    """Logits in a program, and what is computed from them.

    Attributes:
      scope: the program.
      logits: the product.
      inside: the equations that compute numbers with a dim of words, or what those need, in order.
      recipe: how blocks of positions are computed.
      results: the values that are read outside, and how they are cut. One without a cut is a sum
        over positions.
      items: the numbers of the results' items.
      lengths: the numbers of positions and of words.
    """

    scope: TracedScope
    logits: Equation
    inside: tuple[Equation, ...]
    recipe: Recipe
    results: tuple[tuple[Value, Cuts], ...]
    items: tuple[int, ...]
    lengths: dict[str, int]


def find_head(scope: TracedScope, eq: Equation, *, small: bool = False) -> HeadSite | None:
    """Return the site that a product begins; None if it begins none.

    Args:
      scope: the program.
      eq: a `dot_general` equation of it.
      small: whether there may be fewer words than the product sums over.
    """
    cuts = _cuts_of_logits(eq, small=small)
    if cuts is None:
        return None
    followed = _followed(scope, eq, cuts)
    if followed is None:
        return None
    known, inside = followed
    results = [(v, known[v]) for v in _read_outside(scope, inside)]
    if any(WORD in labels_of(own) for _, own in results):
        return None
    lengths = _lengths(known, results)
    if lengths is None or not _sums_end(scope, inside, known):
        return None
    recipe = Recipe(scope, LABELS, inner=inside, known=known)
    items = tuple(recipe.add(value, own) for value, own in results)
    if any(scope.visible(root.operand) is None for _, root in recipe.roots()):
        return None
    return HeadSite(
        scope=scope,
        logits=eq,
        inside=inside,
        recipe=recipe,
        results=tuple(results),
        items=items,
        lengths=lengths,
    )


def _cuts_of_logits(eq: Equation, *, small: bool) -> Cuts | None:
    """Return the cuts of a product that may be logits: along words, and the longest other dim."""
    contracted, batch = eq.params["dimension_numbers"]
    shape = eq.outputs[0].aval.shape
    if any(batch) or not eq.outputs[0].is_float or len(shape) > MOST_DIMS:
        return None
    for side, dims in enumerate(dot_dims(eq)):
        free = [d for d in dims if d is not None]
        others = [d for d in dot_dims(eq)[1 - side] if d is not None]
        if len(free) != 1 or not others:
            continue
        num_summed = 1
        for d in contracted[side]:
            num_summed *= shape_of(eq.inputs[side])[d]
        position = max(others, key=lambda d: shape[d])
        if not small and (shape[free[0]] <= num_summed or shape[position] < 2):
            continue
        found: dict[int, Cut] = {free[0]: (WORD, 0), position: (POSITION, 0)}
        return tuple(found.get(d) for d in range(len(shape)))
    return None


def _followed(
    scope: TracedScope, eq: Equation, cuts: Cuts
) -> tuple[dict[Value, Cuts], tuple[Equation, ...]] | None:
    """Follow logits forward.

    Returns:
      The cuts of all that is computed from them inside, and the equations that compute it; None if
      something has no rule.
    """
    equations = scope.program.equations
    first = equations.index(eq)
    known: dict[Value, Cuts] = {eq.outputs[0]: cuts}
    readers: list[Equation] = []
    descends = {eq.outputs[0]}
    made_by: dict[Value, Equation] = {eq.outputs[0]: eq}
    for reader in equations[first + 1 :]:
        if descends.isdisjoint(reader.values):
            continue
        descends.update(reader.outputs)
        made_by.update((v, reader) for v in reader.outputs)
        wide = any(WORD in labels_of(known.get(v, ())) for v in reader.values)
        if wide and reader.name in CONTRACTIONS:
            return None  # a hidden layer
        found = _result_cuts(reader, known)
        if found is None:
            if wide:
                return None
            continue  # a number of positions goes its own way
        known[reader.outputs[0]] = found
        if wide:
            readers.append(reader)
    inside = {eq}
    stack = list(readers)
    while stack:
        reader = stack.pop()
        if reader not in inside:
            inside.add(reader)
            stack += [made_by[v] for v in reader.values if v in descends]
    if any(v not in known for each in inside for v in each.outputs):
        return None
    ordered = tuple(each for each in equations if each in inside)
    return {v: known[v] for each in ordered for v in each.outputs}, ordered


def _result_cuts(eq: Equation, known: dict[Value, Cuts]) -> Cuts | None:
    """Return the cuts of a result of which operands are cut; None if there is no rule."""
    if len(eq.outputs) != 1 or eq.is_pinned or len(eq.outputs[0].aval.shape) > MOST_DIMS:
        return None
    shape = eq.outputs[0].aval.shape
    sizes = {
        (cut[0], n)
        for x in eq.values
        for cut, n in zip(known.get(x, ()), x.aval.shape, strict=False)
        if cut is not None
    }

    def may_be(label: str) -> Sequence[int | None]:
        own = (d for d, n in enumerate(shape) if eq.name == "slice" or (label, n) in sizes)
        return (*own, None)

    def hint(operand: Operand) -> Cuts | None:
        return known.get(operand) if isinstance(operand, Value) else None

    for at_word, at_position in itertools.product(may_be(WORD), may_be(POSITION)):
        if at_word is not None and at_word == at_position:
            continue
        cuts: list[Cut | None] = [None] * len(shape)
        for label, d in ((WORD, at_word), (POSITION, at_position)):
            if d is not None:
                cuts[d] = (label, 0)
        found = operand_cuts(eq, tuple(cuts), hint)
        if found is None:
            continue
        pairs = list(zip(eq.inputs, found, strict=True))
        given = [(known[x], own) for x, own in pairs if isinstance(x, Value) and x in known]
        if all(a == b for a, b in given):
            return tuple(cuts)
    return None


def _lengths(
    known: dict[Value, Cuts], results: Sequence[tuple[Value, Cuts]]
) -> dict[str, int] | None:
    """Return the numbers of positions and of words; None if they differ.

    A model may take the logits of all positions but the last ones. Then only those are computed
    that results have.
    """
    found: dict[str, set[int]] = {label: set() for label in LABELS}
    for value, cuts in known.items():
        for cut, n in zip(cuts, value.aval.shape, strict=True):
            if cut is not None:
                found[cut[0]].add(n)
    if len(found[WORD]) != 1:
        return None
    length = min(found[POSITION])
    for value, cuts in results:
        sizes = [n for cut, n in zip(cuts, value.aval.shape, strict=True) if cut is not None]
        if sizes != [length] and not (len(found[POSITION]) == 1 and not sizes):
            return None
    return {POSITION: length, WORD: found[WORD].pop()} if results else None


def _read_outside(scope: TracedScope, inside: Sequence[Equation]) -> list[Value]:
    """Return the values of equations that others read, or the program returns."""
    own = set(inside)
    return [
        v
        for eq in inside
        for v in eq.outputs
        if any(x not in own for x in scope.readers.get(v, ()))
    ]


def _sums_end(scope: TracedScope, inside: Sequence[Equation], known: dict[Value, Cuts]) -> bool:
    """Return whether what has no dim of positions is a sum over them, and no equation inside reads
    it."""
    own = set(inside)
    for eq in inside:
        for v in eq.outputs:
            if POSITION in labels_of(known[v]):
                continue
            ends = not any(x in own for x in scope.readers.get(v, ()))
            if eq.name != "reduce_sum" or not ends:
                return False
    return True
