"""`ActivationBudget`: the bytes that a plan's activations may take, and what was chosen."""

from __future__ import annotations

import dataclasses
import math

from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import places_of
from zeroxla.fetch.keeping.residual_graph import Rates
from zeroxla.fetch.segments import FetchPlan


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class ActivationBudget:
    """A limit of bytes for the values that forward keeps. The choice is made when a loss is traced.

    Attributes:
      rates: what computing again and moving costs.
      limit: the most bytes of kept values and of one segment's residuals together. If nothing fits,
        the least that can be kept is.
      keeper: chooses for the loss that was traced last; None before.
      newest: what was chosen for it.
    """

    rates: Rates
    limit: float = math.inf
    keeper: Keeper | None = None
    newest: Keeping | None = None

    def choose(self, plan: FetchPlan) -> tuple[FetchPlan, Keeping]:
        """Return a loss's plan, cut into smaller segments, and what its segments keep."""
        plan = cut_segments(plan)
        places = places_of(plan, {*plan.leaves, *plan.inputs}, self.rates)
        self.keeper = Keeper(list(places))
        self.newest = self.keeper.within(self.limit)
        return plan, self.newest
