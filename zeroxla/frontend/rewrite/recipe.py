"""`Recipe`: how blocks of an array are computed from blocks of smaller ones.

An array of scores has as many elements as there are pairs of a query and a key. A block of it can
be computed from blocks of the arrays that it is made of: of queries, keys, masks of padding, and of
none at all where a mask follows from positions. These are the *roots* of a recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zeroxla.frontend.rewrite.cut_dims import Cuts, Window, has_flat, labels_of, sliced
from zeroxla.frontend.rewrite.cuts import compute, operand_cuts
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program.primitives import CONTRACTIONS, REDUCTIONS, SAME_PLACE
from zeroxla.program.trace import Constant, Equation, Operand, Value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlockRoot:
    """An array that is not computed by block, and how it is cut."""

    operand: Operand
    cuts: Cuts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GivenBlock:
    """A block that is given, of a value with these cuts."""

    operand: Operand
    cuts: Cuts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BlockStep:
    """An equation that is computed by block.

    Attributes:
      eq: the equation.
      cuts: the cuts of its result.
      of_operands: the cuts of its operands.
      args: the numbers of the items that its operands are.
    """

    eq: Equation
    cuts: Cuts
    of_operands: tuple[Cuts, ...]
    args: tuple[int, ...]


Item = BlockRoot | GivenBlock | BlockStep


class Recipe:
    """Items in the order in which they can be computed.

    Attributes:
      items: roots, given blocks and equations.
    """

    def __init__(
        self,
        scope: TracedScope,
        labels: Collection[str],
        *,
        inner: Collection[Equation] = (),
        known: Mapping[Value, Cuts] | None = None,
        may_be_flat: bool = False,
    ) -> None:
        """Make a recipe without items.

        Args:
          scope: where equations are found.
          labels: what is cut along all of these is computed by block, where there are rules for it;
            what is not is a root, unless it follows from constants.
          inner: equations that are computed by block whatever their cuts, reductions of cut dims
            included.
          known: cuts of values, by which those of reduced operands are known.
          may_be_flat: whether other dims may be flattened into cut ones; see `Cut`.
        """
        self.scope, self.items = scope, list[Item]()
        self._labels, self._inner = frozenset(labels), frozenset(inner)
        self._known: dict[Value, Cuts] = dict(known or {})
        self._places: dict[Any, int] = {}
        self._may_be_flat = may_be_flat

    def give(self, operand: Operand, cuts: Cuts) -> int:
        """Add a block that is given; return its number."""
        return self._append((id(self.scope.resolve(operand)), cuts), GivenBlock(operand, cuts))

    def add(self, operand: Operand, cuts: Cuts, *, by_parts: bool = False) -> int:
        """Add a block of an array and what it is computed from; return its number.

        Args:
          operand: the array.
          cuts: its cuts.
          by_parts: whether the parts of a concatenation are added, and not the whole as a root: one
            of them may follow from positions.
        """
        operand = self.scope.resolve(operand)
        key = id(operand), cuts
        if key in self._places:
            return self._places[key]
        if isinstance(operand, Constant):
            return self._append(key, BlockRoot(operand, cuts))
        eq = self.scope.producer(operand)
        inner = eq in self._inner
        wanted = inner or self._labels <= labels_of(cuts) or self.scope.is_static(operand)
        wanted |= by_parts and eq is not None and eq.name == "concatenate"
        if eq is None or not wanted:
            return self._append(key, BlockRoot(operand, cuts))
        found = operand_cuts(eq, cuts, self._hint if inner else None)
        if found is not None and not self._may_be_flat and any(map(has_flat, found)):
            found = None
        if found is None or not (inner or self._is_cheap(eq, found)):
            return self._append(key, BlockRoot(operand, cuts))
        self._known.setdefault(operand, cuts)
        is_lookup = eq.name == "gather"
        args = tuple(
            self.add(x, own, by_parts=is_lookup) for x, own in zip(eq.inputs, found, strict=True)
        )
        return self._append(key, BlockStep(eq, cuts, tuple(found), args))

    def _is_cheap(self, eq: Equation, of_operands: Sequence[Cuts]) -> bool:
        """Return whether an equation is to be computed again for a block: products that give all
        labels at once are, and what takes no product or reduction of an operand with all of them.
        """
        if eq.name not in REDUCTIONS | CONTRACTIONS:
            return True
        return not any(self._labels <= labels_of(cuts) for cuts in of_operands)

    def _append(self, key: Any, item: Item) -> int:
        self.items.append(item)
        self._places[key] = len(self.items) - 1
        return self._places[key]

    def _hint(self, operand: Operand) -> Cuts | None:
        operand = self.scope.resolve(operand)
        if isinstance(operand, Constant):
            return None
        if operand in self._known:
            return self._known[operand]
        eq = self.scope.producer(operand)
        if eq not in self._inner or eq is None or eq.name not in SAME_PLACE:
            return None
        same = (x for x in eq.values if x.aval.shape == operand.aval.shape)
        return next((cuts for x in same if (cuts := self._hint(x)) is not None), None)

    def roots(self) -> list[tuple[int, BlockRoot]]:
        """Return the roots that are no constants, with their numbers."""
        pairs = enumerate(self.items)
        return [
            (i, x)
            for i, x in pairs
            if isinstance(x, BlockRoot) and not isinstance(x.operand, Constant)
        ]

    def needs(self, wanted: Sequence[int]) -> list[int]:
        """Return the numbers of the items that some items are computed from, themselves too."""
        needed = set(wanted)
        for i in reversed(range(len(self.items))):
            item = self.items[i]
            if i in needed and isinstance(item, BlockStep):
                needed.update(item.args)
        return sorted(needed)

    def run(self, wanted: Sequence[int], given: Mapping[int, Any], window: Window) -> list[Any]:
        """Compute blocks.

        Args:
          wanted: the numbers of the items.
          given: by number, the blocks of roots and of what is given.
          window: where the block lies.
        """
        env = dict(given)
        for i in self.needs([i for i in wanted if i not in env]):
            item = self.items[i]
            if i in env or isinstance(item, GivenBlock):
                continue
            if isinstance(item, BlockRoot):
                if isinstance(item.operand, Constant):
                    env[i] = sliced(item.operand.value, item.cuts, window)
            else:
                args = [env[j] for j in item.args]
                env[i] = compute(item.eq, item.cuts, item.of_operands, window, args)
        return [env[i] for i in wanted]
