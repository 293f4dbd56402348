"""Decides which gathered leaves are kept for their next use instead of being gathered again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from zeroxla.config.fetch_limits import FetchLimits

Key = TypeVar("Key")


def kept_uses(
    uses: Sequence[Sequence[Key]],
    sizes: Mapping[Key, int],
    limits: FetchLimits,
) -> frozenset[tuple[int, Key]]:
    """Decide, along forward and backward, which leaves stay alive between two of their uses.

    A leaf is kept if at most `limits.max_reuse` elements are gathered between the two uses, and if
    the kept elements stay within `limits.max_live` at any time. The nearest reuses come first.

    Args:
      uses: the leaves that each moment uses, in order of time.
      sizes: number of elements in each leaf.
      limits: DeepSpeed's `stage3_max_live_parameters` (here for kept leaves only) and
        `stage3_max_reuse_distance`.

    Returns:
      (time, leaf) for each leaf that is kept after its use at that time.
    """
    before = [0]
    for leaves in uses:
        before.append(before[-1] + sum(sizes[k] for k in leaves))
    last: dict[Key, int] = {}
    spans: list[tuple[int, int, int, Key]] = []
    for now, leaves in enumerate(uses):
        for leaf in leaves:
            if leaf in last:
                then = last[leaf]
                spans.append((before[now] - before[then + 1], then, now, leaf))
            last[leaf] = now
    live = [0] * len(uses)
    kept = set()
    for distance, then, now, leaf in sorted(spans, key=lambda s: s[:3]):
        span = range(then, now)
        fits = max((live[t] for t in span), default=0) + sizes[leaf] <= limits.max_live
        if distance <= limits.max_reuse and fits:
            kept.add((then, leaf))
            for t in span:
                live[t] += sizes[leaf]
    return frozenset(kept)
