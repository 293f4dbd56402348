"""`AttentionSite`: attention in a program, and what is known of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax

from zeroxla.frontend.rewrite.cut_dims import Cut, Cuts
from zeroxla.frontend.rewrite.cuts import dot_dims
from zeroxla.frontend.rewrite.recipe import BlockStep, Recipe
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.frontend.rewrite.softmax import Softmax
from zeroxla.program.trace import Equation, Value, run

QUERY: str = "query"
KEY: str = "key"
LABELS = (QUERY, KEY)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SoftmaxProduct:
    """A product of values with something that is linear in a softmax.

    Attributes:
      scope: the program.
      eq: the product.
      after: the equations after it that belong to the attention, in order. There are some if values
        are multiplied by exponentials and divided by their sum afterwards; the last one divides.
      side: the place of the operand that depends on the softmax.
      softmax: the softmax.
      chain: the equations from there to the product, in order, each with the place of its operand
        that depends on the softmax.
    """

    scope: TracedScope
    eq: Equation
    after: tuple[Equation, ...]
    side: int
    softmax: Softmax
    chain: tuple[tuple[Equation, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionSite(SoftmaxProduct):
    """Attention in a program: a `SoftmaxProduct` of probabilities and values.

    Attributes:
      cuts: the cuts of the operand that the probabilities have become.
      own_cuts: the cuts of the scores.
      recipe: how blocks are computed.
      scores, keep, given, probs, values: the numbers of its items: the scores, what the softmax
        keeps of them (None: all), the probabilities that are given, what becomes of them, and the
        values.
      lengths: the numbers of queries and of keys.
    """

    cuts: Cuts
    own_cuts: Cuts
    recipe: Recipe
    scores: int
    keep: int | None
    given: int
    probs: int
    values: int
    lengths: Mapping[str, int]

    @property
    def roots(self) -> list[int]:
        """The numbers of the recipe's roots, in the order in which arrays are given."""
        return [i for i, _ in self.recipe.roots()]

    @property
    def key_dim(self) -> int:
        """The scores' dim of keys."""
        return self.own_cuts.index(Cut(KEY))

    @property
    def result_cuts(self) -> Cuts:
        """The cuts of the product's result."""
        found: list[Cut | None] = [None] * len(self.eq.outputs[0].aval.shape)
        for cut, d in zip(self.cuts, dot_dims(self.eq)[self.side], strict=True):
            if d is not None:
                found[d] = cut
        return tuple(found)

    @property
    def inside(self) -> frozenset[Equation]:
        """The equations that compute arrays with an element for each query and each key."""
        made = {x.eq for x in self.recipe.items if isinstance(x, BlockStep)}
        chain = {eq for eq, _ in self.chain}
        return frozenset({self.eq, *self.after, *made, *chain, *self.softmax.inside})

    @property
    def last(self) -> Equation:
        """The equation that gives the attention's result."""
        return self.after[-1] if self.after else self.eq

    def finished(self, mixed: jax.Array) -> jax.Array:
        """Return the attention's result from the product of normalised probabilities and values."""
        if not self.after:
            return mixed
        env: dict[Value, Any] = {self.eq.outputs[0]: mixed}
        run(self.after[:-1], env)
        *_, numerator = env.values()
        return numerator.astype(self.last.outputs[0].aval.dtype)

    def has_products(self, number: int) -> bool:
        """Return whether an item is computed from products of queries and keys."""
        needed = map(self.recipe.items.__getitem__, self.recipe.needs([number]))
        return any(isinstance(x, BlockStep) and x.eq.name == "dot_general" for x in needed)

    def vanishing(self) -> Iterator[Value]:
        """Yield the values that depend on the scores' products and that need not exist."""
        for i, item in enumerate(self.recipe.items):
            if isinstance(item, BlockStep) and self.has_products(i):
                yield from item.eq.outputs
        for eq in (*self.softmax.inside, *(eq for eq, _ in self.chain)):
            yield from eq.outputs
        yield from (v for eq in self.calls() for v in eq.outputs)
        if self.after:
            yield from (v for eq in (self.eq, *self.after[:-1]) for v in eq.outputs)

    def shifts(self) -> set[Equation]:
        """Return the equations outside that read such values, and what follows from them up to the
        site."""
        inside = {*self.inside, *self.calls()}
        readers = (x for v in self.vanishing() for x in self.scope.readers.get(v, ()))
        found = [following(self.scope, x, inside) for x in readers if x is not None]
        return {eq for each in found if each is not None for eq in each}

    def calls(self) -> set[Equation]:
        """Return the program's functions with a derivative of their own that equations are in."""
        every = self.inside
        return {self.scope.call_of(eq) for eq in every} - every


def following(
    scope: TracedScope, eq: Equation, inside: Collection[Equation]
) -> set[Equation] | None:
    """Return an equation and those that follow from it up to the site, such as those of a row's
    largest score, which is subtracted; None if something else reads what follows."""
    stack, seen = [eq], set[Equation]()
    while stack:
        eq = stack.pop()
        if eq in inside or eq in seen:
            continue
        seen.add(eq)
        for v in eq.outputs:
            readers = scope.readers.get(v, ())
            if eq.is_pinned or None in readers:
                return None
            stack += [x for x in readers if x is not None]
    return seen
