"""`FetchLimits`: how far gathers run ahead, and how many gathered elements are kept."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """How far gathers run ahead, and what is kept; in elements. See `ZeroConfig`."""

    prefetch: int | None = 0  # None: one unit ahead
    max_live: int = 0
    max_reuse: int = 0
