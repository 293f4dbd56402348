"""Losses and gradients of a model whose work on one row is split over axes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from zeroxla.frontend.staged import StagedDifferentiator
from zeroxla.step.axes.deals import Deals
from zeroxla.step.gradients import Differentiator
from zeroxla.wire.wire_state import WireState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxesDifferentiator:
    """One device's part of a step, inside `shard_map`: deals the leaves, and lets a differentiator
    of the split loss do the rest.

    Attributes:
      inner: differentiates the split loss. Its leaves are the parts.
      deals: deals the leaves and their gradients.
    """

    inner: Differentiator | StagedDifferentiator
    deals: Deals

    def gradients(
        self, params: Any, *rest: Any
    ) -> tuple[list[jax.Array | None], dict[str, Any], Any, WireState | None]:
        """Compute this device's gradient shards; see `Differentiator.gradients`."""
        grads, metrics, model_state, wires = self.inner.gradients(self._parts(params), *rest)
        wires = wires and dataclasses.replace(wires, parts=self.deals.parts)
        return self.deals.from_parts(grads), metrics, model_state, wires

    def evaluate(self, params: Any, *rest: Any) -> dict[str, Any]:
        """Return the metrics of the whole batch, without gradients."""
        return self.inner.evaluate(self._parts(params), *rest)

    def _parts(self, params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten(self.deals.to_parts(leaves))
