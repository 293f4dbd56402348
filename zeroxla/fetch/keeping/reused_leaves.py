"""`ReusedLeaves`: gathered leaves that stay whole from forward to backward.

Backward then need not gather them again. The leaves of the last segments stay first, because
backward needs them soonest. Of a loop over layers all leaves stay, or none does. Leaves of a
`jax.checkpoint` body do not stay, because its forward runs again and gathers them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zeroxla.fetch.keeping.places import SegmentPlace
from zeroxla.fetch.order import stacked_leaves
from zeroxla.fetch.segments import FetchPlan
from zeroxla.program.trace import bytes_of

MOST_LEVELS = 5
"""The most numbers of leaves among which is chosen."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReusedLeaves:
    """Leaves that stay gathered from forward to backward.

    Attributes:
      elements: the most elements that stay gathered, as `FetchLimits.max_live`.
      num_bytes: the bytes of those that do.
      again_bytes: the bytes of the leaves that backward gathers again.
    """

    elements: int = 0
    num_bytes: int = 0
    again_bytes: int = 0


def reused_leaves(plan: FetchPlan, places: Sequence[SegmentPlace]) -> tuple[ReusedLeaves, ...]:
    """Return choices from no leaves that stay to all that can.

    Args:
      plan: the plan of a loss.
      places: its straight segments.
    """
    sizes: list[tuple[int, int]] = []  # elements and bytes, of the plan's last segment first
    never = 0
    for i, segment in reversed([*enumerate(plan.segments)]):
        inside = [p for p in places if p.path[0][0] == i]
        num_bytes = sum(_bytes_in_backward(p) for p in inside)
        if any(p.runs_twice for p in inside):
            never += num_bytes
        elif num_bytes:
            stacked = stacked_leaves(segment)
            own = {v for p in inside for v in p.leaves_of_backward()}
            sizes.append((sum(v.aval.size for v in stacked or own), num_bytes))
    sums = [*itertools.accumulate(sizes, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0))]
    total = sums[-1][1] + never
    levels = [ReusedLeaves(elements, kept, total - kept) for elements, kept in sums]
    count = min(MOST_LEVELS, len(levels))
    return tuple(levels[round(k * (len(levels) - 1) / max(count - 1, 1))] for k in range(count))


def _bytes_in_backward(place: SegmentPlace) -> int:
    """Return the bytes of the leaves that backward gathers for a segment, in all its turns."""
    return place.turns * sum(map(bytes_of, place.leaves_of_backward()))
