"""`PlanKeeper`: chooses what a plan's segments keep, and whether they are cut for it."""

from __future__ import annotations

from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.fetch.segments import FetchPlan


class PlanKeeper:
    """Chooses what a plan keeps.

    What crosses a cut is kept, and residuals of one piece need not be there together with those of
    another. Neither is better in general, so the plan as it is and the cut one are both weighed.

    Args:
      plan: the plan of a loss.
      rates: what computing again and moving costs.
    """

    def __init__(self, plan: FetchPlan, rates: DeviceRates) -> None:
        cut = cut_segments(plan)
        self.plans = (plan,) if cut is plan else (plan, cut)
        finder = PlaceFinder(rates)
        self._keepers = tuple(
            Keeper(finder.find(plan, {*plan.leaves, *plan.inputs}), rates) for plan in self.plans
        )

    def plan_of(self, keeping: Keeping) -> FetchPlan:
        """Return the plan whose segments a choice is for."""
        pairs = zip(self.plans, self._keepers, strict=True)
        return next(plan for plan, keeper in pairs if keeper.places is keeping.places)

    def everything(self) -> Keeping:
        """Return the choice that computes nothing again that takes time."""
        return self._keepers[0].everything()

    def leasts(self) -> list[Keeping]:
        """Return the choice that keeps least of each plan, in the order of `plans`."""
        return [keeper.least() for keeper in self._keepers]

    def within(self, limit: float, only: int | None = None) -> Keeping:
        """Return the choice of the least seconds whose `num_bytes` are at most `limit`; if there is
        none, the one of the fewest bytes.

        Args:
          limit: bytes.
          only: the number of the plan that is asked; None asks all.
        """
        keepers = self._keepers if only is None else (self._keepers[only],)
        found = [keeper.within(limit) for keeper in keepers]
        fitting = [k for k in found if k.num_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda k: (k.seconds, k.num_bytes))
        return min(found, key=lambda k: k.num_bytes)
