"""Finds logits that only numbers of positions are computed from, such as losses.

The search begins at a product of activations and a head, and follows its result forward: through
what has a number for each position and each word, until words are summed over or one of them is
looked up. Where all ends so, the logits need not exist at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts, labels_of, reshaped, shape_of
from zeroxla.frontend.rewrite.cuts import dot_dims
from zeroxla.frontend.rewrite.recipe import Recipe
from zeroxla.frontend.rewrite.result_cuts import result_cuts
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.frontend.rewrite.softmax import stripped
from zeroxla.program.primitives import CONTRACTIONS
from zeroxla.program.trace import Equation, Operand, Value

POSITION, WORD = "position", "word"
LABELS = (POSITION, WORD)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadSite:
    """Logits in a program, and what is computed from them.

    Attributes:
      scope: the program.
      logits: the product.
      cuts: how its result is cut.
      inside: the equations that compute numbers with a dim of words, or what those need, in order.
      recipe: how blocks of positions are computed.
      results: the values that are read outside, and how they are cut. One without a cut is a sum
        over positions.
      items: the numbers of the results' items.
      begin: the first position that results have.
      lengths: the numbers of positions and of words.
    """

    scope: TracedScope
    logits: Equation
    cuts: Cuts
    inside: tuple[Equation, ...]
    recipe: Recipe
    results: tuple[tuple[Value, Cuts], ...]
    items: tuple[int, ...]
    begin: int
    lengths: dict[str, int]


def find_head(scope: TracedScope, eq: Equation, cuts: Cuts | None = None) -> HeadSite | str | None:
    """Return the site that a product begins.

    Args:
      scope: the program.
      eq: a `dot_general` equation of it.
      cuts: the cuts of the product, if they are known; all that may be are tried otherwise.

    Returns:
      The site; a sentence that says why logits, of which a softmax is taken, are not to be
      rewritten; None if the product gives no logits.
    """
    every = _cuts_of_logits(scope, eq) if cuts is None else [cuts]
    reasons: list[str] = []
    for each in every:
        found = _site(scope, eq, each)
        if isinstance(found, HeadSite):
            return found
        if found is not None:
            reasons.append(found)
    return reasons[0] if reasons else None


def _site(scope: TracedScope, eq: Equation, cuts: Cuts) -> HeadSite | str | None:
    """Return the site of logits with these cuts, why they have none, or None if they are none."""
    followed = _followed(scope, eq, cuts)
    if followed is None:
        return None
    known, inside, reason = followed
    results = [(v, known[v]) for v in _read_outside(scope, inside)]
    positions = _positions(known, results)
    if reason is None and any(WORD in labels_of(own) for _, own in results):
        reason = "logits are a result of the program too"
    if reason is None and not _sums_end(scope, inside, known):
        reason = "numbers of all positions together are read beside logits"
    if reason is None and positions is None:
        reason = "what is computed from logits has different positions"
    if reason is not None or positions is None:
        return reason if _has_softmax(scope, known) else None
    recipe = Recipe(scope, LABELS, inner=inside, known=known, may_be_flat=True)
    items = tuple(recipe.add(value, own) for value, own in results)
    if any(scope.visible(root.operand) is None for _, root in recipe.roots()):
        return "what it is computed from is inside a function with a derivative of its own"
    return HeadSite(
        scope=scope,
        logits=eq,
        cuts=cuts,
        inside=inside,
        recipe=recipe,
        results=tuple(results),
        items=items,
        begin=positions[0],
        lengths=positions[1],
    )


def _has_softmax(scope: TracedScope, known: dict[Value, Cuts]) -> bool:
    """Return whether exponentials of words are summed over them."""
    for v, cuts in known.items():
        eq = scope.producer(v)
        if eq is None or eq.name != "reduce_sum" or WORD in labels_of(cuts):
            continue
        summed = scope.producer(stripped(scope, eq.inputs[0]))
        if summed is not None and summed.name == "exp" and summed.outputs[0] in known:
            return True
    return False


def _cuts_of_logits(scope: TracedScope, eq: Equation) -> Iterator[Cuts]:
    """Yield the cuts of a product that may be logits: along words, and the longest other dim."""
    contracted, batch = eq.params["dimension_numbers"]
    shape = eq.outputs[0].aval.shape
    if any(batch) or not eq.outputs[0].is_float:
        return
    for side, dims in enumerate(dot_dims(eq)):
        free = [d for d in dims if d is not None]
        others = [d for d in dot_dims(eq)[1 - side] if d is not None]
        if len(free) != 1 or not others:
            continue
        num_summed = math.prod(shape_of(eq.inputs[side])[d] for d in contracted[side])
        position = max(others, key=lambda d: shape[d])
        if shape[free[0]] <= num_summed or shape[position] < 2:
            continue
        in_operand = dot_dims(eq)[1 - side].index(position)
        for cut in (Cut(POSITION), *_flattened(scope, eq.inputs[1 - side], in_operand)):
            found: dict[int, Cut] = {free[0]: Cut(WORD), position: cut}
            yield tuple(found.get(d) for d in range(len(shape)))


def _flattened(scope: TracedScope, operand: Operand, dim: int) -> Iterator[Cut]:
    """Yield the cut of a dim along the longest of the dims that are flattened into it."""
    eq = scope.producer(scope.resolve(operand))
    if eq is None or eq.name != "reshape":
        return
    before, after = shape_of(eq.inputs[0]), shape_of(eq.outputs[0])
    for d in sorted(range(len(before)), key=lambda d: before[d], reverse=True):
        cuts = tuple(Cut(POSITION) if i == d else None for i in range(len(before)))
        found = reshaped(cuts, before, after)
        cut = None if found is None else found[dim]
        if cut is not None:
            if cut.is_flat:
                yield cut
            return


def _followed(
    scope: TracedScope, eq: Equation, cuts: Cuts
) -> tuple[dict[Value, Cuts], tuple[Equation, ...], str | None] | None:
    """Follow logits forward.

    Returns:
      The cuts of all that is computed from them inside, the equations that compute it, and what
      speaks against it, if something does; None if words are multiplied, as in a hidden layer.
    """
    equations = scope.program.equations
    first = equations.index(eq)
    known: dict[Value, Cuts] = {eq.outputs[0]: cuts}
    readers: list[Equation] = []
    descends = {eq.outputs[0]}
    made_by: dict[Value, Equation] = {eq.outputs[0]: eq}
    reason: str | None = None
    for reader in equations[first + 1 :]:
        if descends.isdisjoint(reader.values):
            continue
        descends.update(reader.outputs)
        made_by.update((v, reader) for v in reader.outputs)
        if known.keys().isdisjoint(reader.values):
            continue
        wide = any(WORD in labels_of(known.get(v, ())) for v in reader.values)
        if wide and reader.name in CONTRACTIONS and not _sums_words(reader):
            return None
        found = result_cuts(reader, known, LABELS)
        if found is not None:
            known[reader.outputs[0]] = found
            if wide:
                readers.append(reader)
        elif wide and reason is None:
            reason = f"`{reader.name}` of logits is not computed position by position"
    inside = {eq}
    stack = list(readers)
    while stack:
        reader = stack.pop()
        if reader not in inside:
            inside.add(reader)
            stack += [made_by[v] for v in reader.values if v in descends]
    if reason is None and any(v not in known for each in inside for v in each.outputs):
        reason = "numbers of all positions together are read beside logits"
    ordered = tuple(each for each in equations if each in inside)
    if reason is None:
        known = {v: known[v] for each in ordered for v in each.outputs}
    return known, () if reason else ordered, reason


def _sums_words(eq: Equation) -> bool:
    """Return whether a product only sums over dims, as an einsum of labels and logits does."""
    if eq.name != "dot_general":
        return False
    num_shared = len(eq.params["dimension_numbers"][1][0])
    return len(eq.outputs[0].aval.shape) == num_shared


def _positions(
    known: dict[Value, Cuts], results: Sequence[tuple[Value, Cuts]]
) -> tuple[int, dict[str, int]] | None:
    """Return the first position, and the numbers of positions and of words; None if they differ.

    A model may leave out the logits of the first or the last positions. Then only those are
    computed that results have.
    """
    words, spans = set[int](), set[tuple[int, int]]()
    for value, cuts in known.items():
        words.update(_lengths(value, cuts, WORD))
        spans.update(_spans(value, cuts))
    if len(words) != 1 or not results:
        return None
    begin, end = max(x for x, _ in spans), min(x for _, x in spans)
    for value, cuts in results:
        own = _spans(value, cuts)
        if own != [(begin, end)] and (own or len(spans) > 1):
            return None
    return (begin, {POSITION: end - begin, WORD: words.pop()}) if end > begin else None


def _lengths(value: Value, cuts: Cuts, label: str) -> list[int]:
    pairs = zip(cuts, value.aval.shape, strict=True)
    return [cut.length(n) for cut, n in pairs if cut is not None and cut.label == label]


def _spans(value: Value, cuts: Cuts) -> list[tuple[int, int]]:
    """Return the first position that a value has, and the end of those that it has."""
    firsts = [cut.first for cut in cuts if cut is not None and cut.label == POSITION]
    lengths = _lengths(value, cuts, POSITION)
    return [(-first, n - first) for first, n in zip(firsts, lengths, strict=True)]


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
