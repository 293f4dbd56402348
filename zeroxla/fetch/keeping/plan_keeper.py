"""`PlanKeeper`: chooses what a plan's segments keep, and whether they are cut for it."""

from __future__ import annotations

from collections.abc import Sequence

from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.fetch.keeping.cuts import cut_segments
from zeroxla.fetch.keeping.places import PlaceFinder, SegmentPlace
from zeroxla.fetch.keeping.reused_leaves import reused_leaves
from zeroxla.fetch.segments import FetchPlan


class PlanKeeper:
    """Chooses what a plan keeps.

    What crosses a cut is kept, and residuals of one piece need not be there together with those of
    another. Neither is better in general, so the plan as it is and the cut one are both weighed.
    The third plan, whose pieces run a second time before backward, keeps least and computes most;
    it is weighed only if it is asked for.

    Args:
      plan: the plan of a loss.
      opened: the same with a plan for each `jax.checkpoint`, if some have none in `plan`. What they
        compute again can only be cut there.
      finder: finds and weighs the segments of a plan.
      may_reuse: whether gathered leaves may stay whole from forward to backward.

    Attributes:
      plans: the plans.
      usual: how many of them are always weighed.
    """

    def __init__(
        self,
        plan: FetchPlan,
        opened: FetchPlan | None,
        finder: PlaceFinder,
        *,
        may_reuse: bool = False,
    ) -> None:
        whole = plan if opened is None else opened
        cut, twice = cut_segments(whole), cut_segments(whole, runs_twice=True)
        self.plans = (plan, *(other for other in (cut, twice) if other is not whole))
        self.usual = 1 if cut is whole else 2
        self._finder, self._may_reuse = finder, may_reuse
        self._keepers: dict[int, Keeper] = {}
        for number in range(self.usual):
            self._keeper(number)

    def _keeper(self, number: int) -> Keeper:
        if number not in self._keepers:
            plan = self.plans[number]
            places = self._finder.find(plan, {*plan.leaves, *plan.inputs})
            levels = reused_leaves(plan, places)
            levels = levels if self._may_reuse else levels[:1]
            seconds, flops = _run_twice(places)
            if number >= self.usual:  # of the others only what the model asks for runs twice
                own_s, own_flops = _run_twice(self._keepers[self.usual - 1].places)
                twice = {"twice_s": seconds - own_s, "twice_flops": flops - own_flops}
            else:
                twice = {}
            self._keepers[number] = Keeper(places, self._finder.rates, levels, **twice)
        return self._keepers[number]

    def plan_of(self, keeping: Keeping) -> FetchPlan:
        """Return the plan whose segments a choice is for."""
        pairs = self._keepers.items()
        return next(self.plans[i] for i, keeper in pairs if keeper.places is keeping.places)

    def everything(self) -> Keeping:
        """Return the choice that computes nothing again that takes time."""
        return self._keeper(0).everything()

    def leasts(self) -> list[Keeping]:
        """Return the choice that keeps least of each usual plan, in the order of `plans`."""
        return [self._keeper(number).least() for number in range(self.usual)]

    def within(self, limit: float, only: int | None = None, *, reuse: bool = False) -> Keeping:
        """Return the choice of the least seconds whose `num_bytes` are at most `limit`; if there is
        none, the one of the fewest bytes.

        Args:
          limit: bytes.
          only: the number of the plan that is asked; None asks all that have been weighed.
          reuse: whether gathered leaves stay for backward where that is faster.
        """
        keepers = [*self._keepers.values()] if only is None else [self._keeper(only)]
        found = [keeper.within(limit, reuse=reuse) for keeper in keepers]
        fitting = [k for k in found if k.num_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda k: (k.seconds, k.num_bytes))
        return min(found, key=lambda k: k.num_bytes)


def _run_twice(places: Sequence[SegmentPlace]) -> tuple[float, float]:
    """Return the seconds and FLOPs of segments that run forward a second time."""
    twice = [p for p in places if p.runs_twice]
    seconds = sum(p.turns * p.kind.forward_s for p in twice)
    return seconds, sum(p.turns * p.kind.forward_flops for p in twice)
