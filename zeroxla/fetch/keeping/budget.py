"""`ActivationBudget`: the bytes that a plan's activations may take, and what was chosen."""

from __future__ import annotations

import dataclasses

from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.plan_keeper import PlanKeeper
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.fetch.segments import FetchPlan


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class ActivationBudget:
    """A limit of bytes for the values that forward keeps. The choice is made when a loss is traced.

    Attributes:
      rates: what computing again and moving costs.
      limit: the most bytes of kept values and of one segment's residuals together. If nothing fits,
        the least that can be kept is. None keeps all, as without a budget.
      only: the number of the plan, of `PlanKeeper.plans`, that is taken; None takes the best.
      newest: what was chosen for the loss that was traced last.
    """

    rates: DeviceRates
    limit: float | None = None
    only: int | None = None
    newest: Keeping | None = None
    _plan: FetchPlan | None = None
    _keeper: PlanKeeper | None = None

    def choose(self, plan: FetchPlan) -> tuple[FetchPlan, Keeping | None]:
        """Return a loss's plan, maybe cut into smaller segments, and what its segments keep."""
        self._plan, self._keeper = plan, None
        if self.limit is None:
            return plan, None
        self.newest = self.keeper.within(self.limit, self.only)
        return self.keeper.plan_of(self.newest), self.newest

    @property
    def keeper(self) -> PlanKeeper:
        """What chooses for the loss that was traced last."""
        if self._keeper is None:
            assert self._plan is not None, "no loss was traced"
            self._keeper = PlanKeeper(self._plan, self.rates)
        return self._keeper
