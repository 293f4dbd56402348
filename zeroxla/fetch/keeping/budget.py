"""`ActivationBudget`: the bytes that a plan's activations may take, and what was chosen."""

from __future__ import annotations

import dataclasses

from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.fetch.keeping.keep_everything import KeepEverything
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.plan_keeper import PlanKeeper
from zeroxla.fetch.segments import FetchPlan


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class ActivationBudget:
    """A limit of bytes for the values that forward keeps. The choice is made when a loss is traced.

    Attributes:
      finder: finds and weighs the segments of a plan. Budgets that share one weigh a kind of
        segment once.
      may_reuse: whether gathered leaves may stay whole from forward to backward.
      limit: the most bytes of leaves that stay, of kept values and of one segment's residuals
        together. If nothing fits, the least that can be kept is. None keeps all, as without a
        budget.
      reuse: whether gathered leaves stay for backward where that is faster.
      only: the number of the plan, of `PlanKeeper.plans`, that is taken; None takes the best.
      newest: what was chosen for the loss that was traced last.
    """

    finder: PlaceFinder
    may_reuse: bool = False
    limit: float | None = None
    reuse: bool = False
    only: int | None = None
    newest: Keeping | None = None
    _plans: tuple[FetchPlan, FetchPlan | None] | None = None
    _keeper: PlanKeeper | None = None

    def choose(
        self, plan: FetchPlan, opened: FetchPlan | None = None
    ) -> tuple[FetchPlan, Keeping | KeepEverything]:
        """Return a loss's plan, maybe cut into smaller segments, and what its segments keep.

        Args:
          plan: the plan.
          opened: the same with a plan for each `jax.checkpoint`, if some have none in `plan`.
        """
        self._plans, self._keeper = (plan, opened), None
        if self.limit is None:
            return plan, self.finder.everything
        self.newest = self.keeper.within(self.limit, self.only, reuse=self.reuse)
        return self.keeper.plan_of(self.newest), self.newest

    @property
    def reused_elements(self) -> int:
        """The most elements of gathered leaves that stay for backward."""
        return self.newest.reused.elements if self.newest else 0

    @property
    def keeper(self) -> PlanKeeper:
        """What chooses for the loss that was traced last."""
        if self._keeper is None:
            assert self._plans is not None, "no loss was traced"
            self._keeper = PlanKeeper(*self._plans, self.finder, may_reuse=self.may_reuse)
        return self._keeper
