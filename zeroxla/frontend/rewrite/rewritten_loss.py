"""A model's loss, rewritten: the loss that a step differentiates in the place of the model's own.

The rewritten loss is a function like the model's. So whatever traces a loss (the fetch plan, the
search of axes, the stages of a pipeline, a plan of costs) need not know of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zeroxla.config.rewrite import Rewrite
from zeroxla.frontend.rewrite.evaluate import evaluate
from zeroxla.frontend.rewrite.found import Rewritten
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.report import Finding, RewriteReport
from zeroxla.frontend.rewrite.runs_on import RunsOn
from zeroxla.program.shapes import shapes_of, structure_of
from zeroxla.program.trace import trace

MOST_SHAPES = 8
"""So many traces are remembered, for different shapes of arguments."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # JAX refers to it weakly: no slots
class RewrittenLoss:
    """A loss that is rewritten for each shape of its arguments.

    Attributes:
      loss: the model's loss: (params, model_state, batch, key) -> any pytree.
      options: what is rewritten.
      proof: tries what is found.
      runs_on: what the loss runs on.
    """

    loss: Callable[..., Any]
    options: Rewrite
    runs_on: RunsOn
    proof: Proof = dataclasses.field(default_factory=Proof)
    _known: dict[Any, tuple[Rewritten, Any, RewriteReport]] = dataclasses.field(
        default_factory=dict, init=False
    )
    _newest: list[RewriteReport] = dataclasses.field(default_factory=list, init=False)

    def __call__(self, params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        """Return what the loss returns."""
        args = params, model_state, batch, key
        found, result, report = self._of(args)
        self._newest[:] = [report]
        if not found.is_changed:
            return self.loss(*args)
        return result.unflatten(evaluate(found, jax.tree.leaves(args)))

    @property
    def newest(self) -> RewriteReport:
        """The report on the newest shapes; empty before there are some."""
        return self._newest[0] if self._newest else RewriteReport(findings=())

    def _of(self, args: Any) -> tuple[Rewritten, Any, RewriteReport]:
        shapes = shapes_of(args)
        mesh = jax.sharding.get_abstract_mesh()
        leaves = jax.tree.leaves(shapes)
        known = structure_of(shapes), tuple(str(x.dtype) for x in leaves), mesh
        if known not in self._known:
            while len(self._known) >= MOST_SHAPES:
                del self._known[next(iter(self._known))]
            from zeroxla.frontend.rewrite.search import RewriteSearch  # here: few models ask for it

            program, result = trace(self.loss, *shapes)
            search = RewriteSearch(self.options, self.proof, self.runs_on)
            found = search.program(program)
            findings: tuple[Finding, ...] = tuple(search.findings)
            self._known[known] = found, result, RewriteReport(findings=findings)
        return self._known[known]


def rewritten(
    losses: Mapping[bool, Callable[..., Any]], options: Rewrite | bool | None, runs_on: RunsOn
) -> Mapping[bool, Callable[..., Any]]:
    """Return a model's losses, by `train`, rewritten; as they are if nothing is to be.

    Args:
      losses: the losses; see `RewrittenLoss.loss`.
      options: what is rewritten.
      runs_on: what the losses run on.
    """
    if not isinstance(options, Rewrite):
        return losses
    proof = Proof()
    return {
        train: RewrittenLoss(loss=loss, options=options, runs_on=runs_on, proof=proof)
        for train, loss in losses.items()
    }


def rewrites_of(losses: Mapping[bool, Callable[..., Any]]) -> RewriteReport | None:
    """Return the report on the loss of training; None if nothing is to be rewritten."""
    loss = losses[True]
    return loss.newest if isinstance(loss, RewrittenLoss) else None
