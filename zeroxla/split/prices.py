"""What a search pays for conversions."""

from __future__ import annotations

import dataclasses
from typing import Any

from zeroxla.program.trace import Value, bytes_of
from zeroxla.split.atoms import atoms_in
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Holding, Kind, cheapest, num_moves
from zeroxla.split.plan_states import PlanState, of_leaf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prices:
    """The prices of conversions on one axis.

    Attributes:
      parts: the length of the axis.
      role: what may be split along the axis.
      costs: what conversions and work cost.
    """

    parts: int
    role: AxisRole
    costs: AxisCosts
    _known: dict[Any, float] = dataclasses.field(default_factory=dict, init=False)

    def price(
        self, flow: DimsFlow, value: Value, have: frozenset[Holding], want: Holding, source: bool
    ) -> float:
        """Return what it costs to have a value in another holding too.

        Args:
          flow: the flow through its program.
          value: the value.
          have: the holdings in which it exists.
          want: the other holding.
          source: whether it is an input whose holdings are chosen when it is read. A leaf is then
            gathered; another input is taken to exist whole outside.
        """
        key = value, have, want, source
        if key not in self._known:
            self._known[key] = self._price(flow, *key)
        return self._known[key]

    def _price(
        self, flow: DimsFlow, value: Value, have: frozenset[Holding], want: Holding, source: bool
    ) -> float:
        size = bytes_of(value)
        if flow.made_of_leaves(value) and COPIES in have:
            return 0.0
        if source and flow.made_of_leaves(value):
            (given,) = of_leaf(have | {want})
            paid = [self.role.leaf_price(self.costs, size, h, self.parts) for h in have]
            price = self.role.leaf_price(self.costs, size, given, self.parts)
            return max(0.0, price - max(paid, default=0.0))
        if source:
            have = have | {WHOLE}
        has_gradient = flow.has_gradient(value)
        share, first = cheapest(have, want, self.parts, has_gradient=has_gradient)
        moves = num_moves(first, want, has_gradient=has_gradient)
        return self.costs.link * share * size + self.costs.latency * moves

    def reaches(self, flow: DimsFlow, first: PlanState, other: PlanState) -> bool:
        """Return whether a state can hold all that another does and still cost no more."""
        room = other.cost - first.cost
        for (value, have), wants in zip(first.held.items(), other.held.values(), strict=True):
            if wants is have:  # so in most: leaves that are not read yet, and what came before
                continue
            for want in wants - have:
                if want is SUMMANDS or not have:
                    return False
                room -= self.price(flow, value, have, want, False)
                if room < 0:
                    return False
        return True


def can_be_given(flow: DimsFlow, value: Value, want: Holding) -> bool:
    """Return whether an input may be given in a holding: anything in one that is not ragged, and a
    leaf as copies, or as a part if it has another dim, along which its parts are stored in
    shards."""
    if want.kind is Kind.RAGGED:  # whose sizes are known inside alone
        return False
    if not flow.made_of_leaves(value) or want is COPIES:
        return True
    return want.dim is not None and any(
        d != want.dim and n > 1 and not any(a.is_loop for a in atoms_in(dim))
        for d, (n, dim) in enumerate(zip(value.aval.shape, flow.dims[value], strict=True))
    )
