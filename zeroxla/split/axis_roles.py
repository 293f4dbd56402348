"""Roles of mesh axes: what may be split along them.

    tensor     every product with a leaf is split along a dim of the leaf; rows are not split
    context    leaves are whole; products with them are split along the sequence
    expert     rows are split, and products with banks of experts along the experts

Between products, anything is split that makes a plan cheaper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zeroxla.program.primitives import READS_OF_LEAVES
from zeroxla.program.trace import Equation, Value
from zeroxla.split.atoms import Atom
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import Holding, Kind
from zeroxla.split.ways import Way


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisRole:
    """What may be split along an axis.

    Attributes:
      name: the axis.
      rows: the classes of the batch's rows.
      experts: the classes along which leaves are banks of experts.
      only: the only class that may be split; None for no such limit.
    """

    name: str
    rows: frozenset[Atom]
    experts: frozenset[Atom] = frozenset()
    only: Atom | None = None

    def allows_class(self, atom: Atom) -> bool:
        """Return whether arrays may be split along a class."""
        if self.only is not None and atom is not self.only:
            return False
        if self.name == "expert":
            return atom in self.rows or atom in self.experts
        return atom not in self.rows

    def allowed(self, eq: Equation, ways: Sequence[Way], flow: DimsFlow) -> list[Way]:
        """Return the ways in which an equation may run. A product with a leaf is split if it can
        be."""
        found = [way for way in ways if self._allows(eq, way, flow)]
        split = [way for way in found if way.is_split]
        of_leaf = any(flow.made_of_leaves(x) and is_matrix(x.aval.shape) for x in eq.values)
        return split if split and of_leaf and eq.name in READS_OF_LEAVES else found

    def _allows(self, eq: Equation, way: Way, flow: DimsFlow) -> bool:
        """Return whether an equation may run in a way."""
        if not all(map(self.allows_class, way.classes)):
            return False
        if not way.is_split or eq.name not in READS_OF_LEAVES:
            return True
        splits_leaf = [
            needs[0].kind is Kind.PART
            for x, needs in zip(eq.inputs, way.needs, strict=True)
            if isinstance(x, Value) and flow.made_of_leaves(x) and is_matrix(x.aval.shape)
        ]
        if self.name == "context":
            return not any(splits_leaf)
        if self.name == "expert":
            return not any(splits_leaf) or way.classes <= self.experts
        return all(splits_leaf)

    def leaf_price(self, costs: AxisCosts, size: float, want: Holding, parts: int) -> float:
        """Return what a leaf of so many bytes costs in a holding."""
        if self.name == "context":
            return 0.0
        return costs.leaf * size / (parts if want.kind is Kind.PART else 1)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Return whether an array has more than one dim of several elements."""
    return sum(n > 1 for n in shape) > 1
