"""`PlanKeeper`: chooses what a plan's segments keep, and whether they are cut for it."""

from __future__ import annotations

from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.fetch.keeping.reused_leaves import reused_leaves
from zeroxla.fetch.segments import FetchPlan


class PlanKeeper:
    """Chooses what a plan keeps.

    What crosses a cut is kept, and residuals of one piece need not be there together with those of
    another. Neither is better in general, so the plan as it is and the cut one are both weighed.

    Args:
      plan: the plan of a loss.
      opened: the same with a plan for each `jax.checkpoint`, if some have none in `plan`. What they
        compute again can only be cut there.
      rates: what computing again and moving costs.
      may_reuse: whether gathered leaves may stay whole from forward to backward.
    """

    def __init__(
        self,
        plan: FetchPlan,
        opened: FetchPlan | None,
        rates: DeviceRates,
        *,
        may_reuse: bool = False,
    ) -> None:
        whole = plan if opened is None else opened
        cut = cut_segments(whole)
        self.plans = (plan,) if cut is whole else (plan, cut)
        finder = PlaceFinder(rates)
        self._keepers = tuple(
            self._keeper(plan, finder, may_reuse=may_reuse) for plan in self.plans
        )

    @staticmethod
    def _keeper(plan: FetchPlan, finder: PlaceFinder, *, may_reuse: bool) -> Keeper:
        places = finder.find(plan, {*plan.leaves, *plan.inputs})
        levels = reused_leaves(plan, places)
        return Keeper(places, finder.rates, levels if may_reuse else levels[:1])

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

    def within(self, limit: float, only: int | None = None, *, reuse: bool = False) -> Keeping:
        """Return the choice of the least seconds whose `num_bytes` are at most `limit`; if there is
        none, the one of the fewest bytes.

        Args:
          limit: bytes.
          only: the number of the plan that is asked; None asks all.
          reuse: whether gathered leaves stay for backward where that is faster.
        """
        keepers = self._keepers if only is None else (self._keepers[only],)
        found = [keeper.within(limit, reuse=reuse) for keeper in keepers]
        fitting = [k for k in found if k.num_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda k: (k.seconds, k.num_bytes))
        return min(found, key=lambda k: k.num_bytes)
