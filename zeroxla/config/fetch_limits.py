"""`FetchLimits`: how far gathers run ahead, and how many gathered elements are kept."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """How far gathers run ahead, and how much is kept. All limits count elements.

    Attributes:
      prefetch: `ZeroConfig.prefetch_bucket`; None means one unit ahead.
      max_live: `ZeroConfig.max_live_parameters`.
      max_reuse: `ZeroConfig.max_reuse_distance`.
    """

    prefetch: int | None = 0
    max_live: int = 0
    max_reuse: int = 0

    def holding(self, elements: int) -> FetchLimits:
        """Return the limits under which so many elements stay gathered, whatever is gathered until
        they are used; the limits as they are for 0."""
        if not elements:
            return self
        return dataclasses.replace(self, max_live=elements, max_reuse=sys.maxsize)
