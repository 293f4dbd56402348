"""The wire state of a model whose leaves are dealt: copies and errors of the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from zeroxla.step.axes.deals import Deals
from zeroxla.wire.wire_state import WireState, WireStatePlan


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartsWireStatePlan(WireStatePlan):
    """Makes the wire state of the parts that devices compute with.

    Attributes:
      of_parts: makes the wire state of a model whose leaves are the parts.
      deals: deals the stored leaves.
    """

    of_parts: WireStatePlan
    deals: Deals

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return self.of_parts.is_empty

    def specs(self) -> WireState | None:
        """Return how the wire state is split over the mesh; None if there is none."""
        found = self.of_parts.specs()
        if found is None:
            return None
        found = dataclasses.replace(found, parts=self.deals.parts)
        return found.specs(self.deals.placements)

    def start(self, shards: Sequence[jax.Array]) -> WireState:
        """Make the wire state from this device's stored shards; see `WireStatePlan`.

        Cost: leaves are dealt once; the rest is as without the axes.
        """
        found = self.of_parts.start(self.deals.to_parts(shards))
        return dataclasses.replace(found, parts=self.deals.parts)
