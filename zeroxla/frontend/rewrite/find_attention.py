"""Finds attention in a program.

The search begins at a product that could be probabilities times values, and goes back: through what
is done to probabilities (casts, dropout), to a softmax along the dim that the product sums over,
and to the scores, which are computed by block from there on, see `recipe`. Or it begins at a
quotient of such a product, of exponentials and values, and the exponentials' sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from zeroxla.frontend.rewrite.attention_site import (
    KEY,
    LABELS,
    QUERY,
    AttentionSite,
    SoftmaxProduct,
    following,
)
from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts, has_flat, labels_of, shape_of
from zeroxla.frontend.rewrite.cuts import dot_dims, operand_cuts
from zeroxla.frontend.rewrite.recipe import BlockStep, Recipe
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.frontend.rewrite.softmax import (
    Softmax,
    filled_with,
    find_softmax,
    quotients_of,
    softmax_of_weights,
)
from zeroxla.program.primitives import ARRANGEMENTS, PASSED
from zeroxla.program.trace import Equation, Operand, Value

MOST_LINEAR = 64
"""So many equations between a softmax and a product with values are followed."""

SoftmaxFinder = Callable[[Operand, int], Softmax | None]
"""(operand, dim) -> the softmax that the operand is the result of."""


def find_attention(scope: TracedScope, eq: Equation) -> AttentionSite | str | None:
    """Return the attention whose result an equation gives.

    Returns:
      The site; a sentence that says why it is not to be rewritten; None if the equation is no
      product with a softmax along the dim that it sums over, and no quotient of such a product of
      exponentials and their sum.
    """
    if eq.name == "dot_general":
        return _of_product(scope, eq, (), lambda x, dim: find_softmax(scope, x, dim))
    if eq.name not in ("div", "mul"):
        return None
    for numerator, total in quotients_of(scope, eq):
        after: list[Equation] = [eq]
        product = scope.producer(scope.resolve(numerator))
        while product is not None and product.name in ARRANGEMENTS | PASSED:
            after.append(product)
            product = scope.producer(scope.resolve(product.inputs[0]))
        if product is None or product.name != "dot_general":
            continue
        is_whole = shape_of(numerator) == shape_of(eq.outputs[0])
        if not is_whole or any(scope.call_of(x) is not x for x in (product, *after)):
            continue
        if not all(map(scope.is_own, (product, *after))):
            continue
        found = _of_product(
            scope,
            product,
            tuple(reversed(after)),
            lambda x, dim, total=total: softmax_of_weights(scope, x, total, dim),
        )
        if found is not None:
            return found
    return None


def _of_product(
    scope: TracedScope, eq: Equation, after: tuple[Equation, ...], find: SoftmaxFinder
) -> AttentionSite | str | None:
    for side in (0, 1):
        contracted = eq.params["dimension_numbers"][0][side]
        if len(contracted) != 1 or not eq.outputs[0].is_float:
            continue
        shape = shape_of(eq.inputs[side])
        cuts = tuple(Cut(KEY) if d in contracted else None for d in range(len(shape)))
        found = _softmax_below(scope, eq.inputs[side], cuts, find)
        if found is not None:
            softmax, chain = found
            candidate = _Candidate(
                scope=scope, eq=eq, after=after, side=side, softmax=softmax, chain=chain
            )
            return candidate.site()
    return None


def _softmax_below(
    scope: TracedScope, operand: Operand, cuts: Cuts, find: SoftmaxFinder
) -> tuple[Softmax, tuple[tuple[Equation, int], ...]] | None:
    """Return the softmax that an operand is linear in, and the equations from there to it, each
    with the place of its operand that depends on the softmax."""
    seen: set[Equation] = set()
    stack: list[tuple[Operand, Cuts, tuple[tuple[Equation, int], ...]]] = [(operand, cuts, ())]
    while stack:
        operand, cuts, chain = stack.pop()
        dims = [d for d, cut in enumerate(cuts) if cut is not None]
        if len(dims) != 1 or has_flat(cuts):
            continue
        softmax = find(operand, dims[0])
        if softmax is not None:
            return softmax, chain
        eq = scope.producer(scope.resolve(operand))
        if eq is None or eq in seen or not scope.is_own(eq) or len(seen) == MOST_LINEAR:
            continue
        seen.add(eq)
        of_operands = operand_cuts(eq, cuts)
        for i in _linear_in(scope, eq):
            if of_operands is not None:
                stack.append((eq.inputs[i], of_operands[i], ((eq, i), *chain)))
    return None


def _linear_in(scope: TracedScope, eq: Equation) -> tuple[int, ...]:
    """Return the places of the operands in which alone an equation may be taken to be linear."""
    if eq.name in PASSED | ARRANGEMENTS or eq.name in ("neg", "div"):
        return (0,) if shape_of(eq.inputs[0]) else ()
    if eq.name == "mul":
        return tuple(i for i in (0, 1) if shape_of(eq.inputs[i]))
    if eq.name == "select_n" and len(eq.inputs) == 3:
        return tuple(i for i in (1, 2) if filled_with(scope, eq.inputs[3 - i]) == 0)
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Candidate(SoftmaxProduct):
    """A softmax with the products around it. It is attention if `site` finds nothing against it."""

    def site(self) -> AttentionSite | str:
        """Return the attention that it is, or why it is none."""
        contracted, batch = (dims[self.side] for dims in self.eq.params["dimension_numbers"])
        shape = shape_of(self.eq.inputs[self.side])
        free = [d for d in range(len(shape)) if d not in (*contracted, *batch) and shape[d] > 1]
        num_keys = shape[contracted[0]]
        free.sort(key=lambda d: (shape[d] == num_keys, shape[d]), reverse=True)
        reasons: list[str] = []
        for d in free:
            marks: dict[int, Cut] = {d: Cut(QUERY), contracted[0]: Cut(KEY)}
            site = self._with_cuts(tuple(marks.get(i) for i in range(len(shape))))
            if isinstance(site, AttentionSite):
                return _refused(site) or site
            reasons.append(site)
        return reasons[0] if reasons else "the softmax has no dim of queries beside the keys'"

    def _with_cuts(self, cuts: Cuts) -> AttentionSite | str:
        """Return the site if the queries are those along a given dim, or why it is none."""
        scope, eq, side, softmax = self.scope, self.eq, self.side, self.softmax
        own = cuts
        for made, i in reversed(self.chain):
            found = operand_cuts(made, own)
            if found is None or labels_of(found[i]) != set(LABELS) or has_flat(found[i]):
                return "what becomes of the probabilities is not computed query by query"
            own = found[i]
        recipe = Recipe(scope, LABELS)
        scores = recipe.add(softmax.scores, own)
        if not isinstance(recipe.items[scores], BlockStep):
            return f"the scores come from `{_name_of(scope, softmax.scores)}`, which has no blocks"
        if not any(isinstance(x, BlockStep) and x.eq.name == "dot_general" for x in recipe.items):
            return "the scores are no products of queries and keys"
        keep = None if softmax.keep is None else recipe.add(softmax.keep[0], own)
        given = recipe.give(softmax.result, own)
        probs = recipe.add(eq.inputs[side], cuts)
        dims = dot_dims(eq)
        key = cuts.index(Cut(KEY))
        assert dims[side][key] is None
        of_values = tuple(Cut(KEY) if d is None else None for d in dims[1 - side])
        values = recipe.add(eq.inputs[1 - side], of_values)
        shape = shape_of(eq.inputs[side])
        lengths = {cut.label: n for cut, n in zip(cuts, shape, strict=True) if cut is not None}
        return AttentionSite(
            scope=scope,
            eq=eq,
            after=self.after,
            side=side,
            softmax=softmax,
            chain=self.chain,
            cuts=cuts,
            own_cuts=own,
            recipe=recipe,
            scores=scores,
            keep=keep,
            given=given,
            probs=probs,
            values=values,
            lengths=lengths,
        )


def _refused(site: AttentionSite) -> str | None:
    """Return why attention that was found is not to be rewritten; None if it is."""
    scope = site.scope
    inside = {*site.inside, *site.calls()}
    for value in site.vanishing():
        for reader in scope.readers.get(value, ()):
            if reader is None:
                return "scores or probabilities are a result of the program too"
            if following(scope, reader, inside) is None:
                return f"`{reader.name}` reads scores or probabilities too"
    for _, root in site.recipe.roots():
        if scope.visible(root.operand) is None:
            return "what it is computed from is inside a function with a derivative of its own"
        if labels_of(root.cuts) >= set(LABELS) and (made := random_of(scope, root.operand)):
            return f"`{made}` draws bits for all pairs of a query and a key at once"
    return None


def random_of(scope: TracedScope, operand: Operand) -> str | None:
    """Return the primitive that draws the random bits which an operand follows from, if it follows
    from some by elementwise equations alone; None otherwise."""
    seen: set[Operand] = set()
    stack = [scope.resolve(operand)]
    while stack:
        x = stack.pop()
        eq = scope.producer(x)
        if x in seen or eq is None:
            continue
        seen.add(x)
        if eq.name in ("random_bits", "rng_bit_generator", "rng_uniform"):
            return eq.name
        if eq.outputs[0].aval.shape == shape_of(operand):
            stack += [scope.resolve(y) for y in eq.values]
    return None


def _name_of(scope: TracedScope, value: Value) -> str:
    eq = scope.producer(scope.resolve(value))
    return "an input" if eq is None else eq.name
