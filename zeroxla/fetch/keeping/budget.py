"""`ActivationBudget`: the bytes that a plan's activations may take, and what was chosen."""

from __future__ import annotations

import dataclasses

from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import Rates
from zeroxla.fetch.segments import FetchPlan


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class ActivationBudget:
    """A limit of bytes for the values that forward keeps. The choice is made when a loss is traced.

    Attributes:
      rates: what computing again and moving costs.
      limit: the most bytes of kept values and of one segment's residuals together. If nothing fits,
        the least that can be kept is. None keeps all, as without a budget.
      newest: what was chosen for the loss that was traced last.
    """

    rates: Rates
    limit: float | None = None
    newest: Keeping | None = None
    _plan: FetchPlan | None = None
    _keeper: Keeper | None = None

    def choose(self, plan: FetchPlan) -> tuple[FetchPlan, Keeping | None]:
        """Return a loss's plan, cut into smaller segments, and what its segments keep."""
        self._plan, self._keeper = plan, None
        if self.limit is None:
            return plan, None
        self.newest = self.keeper.within(self.limit)
        assert self._plan is not None
        return self._plan, self.newest

    @property
    def keeper(self) -> Keeper:
        """What chooses for the loss that was traced last."""
        if self._keeper is None:
            assert self._plan is not None, "no loss was traced"
            self._plan = plan = cut_segments(self._plan)
            found = PlaceFinder(self.rates).find(plan, {*plan.leaves, *plan.inputs})
            self._keeper = Keeper(found, self.rates)
        return self._keeper
