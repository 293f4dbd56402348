"""Balanced cuts of a list of costs: the true minimax.

No other cut has a lighter heaviest stage. DeepSpeed minimises the difference between its heaviest
and its lightest stage instead, which can leave a heavier one.

Boundaries of P stages are P + 1 indices: stage s holds the layers [boundaries[s], boundaries[s+1]).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from typing import Any


def partition(costs: Iterable[Any], stages: int, *, allow_empty: bool = False) -> list[int]:
    """Cut layers into stages so that the heaviest stage is as light as can be.

    Among the cuts that reach that, the one with the smallest sum of squared stage costs is taken;
    among these the one whose first cut is latest, then whose second is, and so on: a layer that
    costs nothing stays with the layer before it. If no layer costs anything, all count the same.

    Args:
      costs: of each layer: integers or floats, 0 or more.
      stages: P.
      allow_empty: with fewer layers than stages, leave the last stages empty. With as many layers
        or more no stage is ever empty, since an empty one makes no other lighter.

    Returns:
      P + 1 boundaries.

    Raises:
      ValueError: a cost is negative or not finite, or there are fewer layers than stages.

    All sums and comparisons are exact: floats are taken as the binary fractions that they are.

    Cost: O(P N log N) steps of Python for N layers; under a second for 1000 layers and 64 stages.

    >>> partition([5, 1, 1, 1, 1, 1], 2)
    [0, 1, 6]
    """
    weights = _integers(costs)
    check_stages(len(weights), stages, allow_empty)
    if len(weights) <= stages:
        return uniform(len(weights), stages)
    if not any(weights):
        weights = [1] * len(weights)
    starts = [0, *itertools.accumulate(weights)]
    return _least_squares(starts, stages, _bottleneck(starts, stages))


def uniform(num_layers: int, stages: int) -> list[int]:
    """Give every stage the same number of layers, the first ones one more where it does not divide.

    With fewer layers than stages the last ones are empty. The boundaries are DeepSpeed's.

    >>> uniform(22, 4)
    [0, 6, 12, 17, 22]
    """
    check_stages(num_layers, stages, allow_empty=True)
    each, more = divmod(num_layers, stages)
    return [stage * each + min(stage, more) for stage in range(stages + 1)]


def check_stages(num_layers: int, stages: int, allow_empty: bool) -> None:
    """Check that there are layers for all stages.

    Raises:
      ValueError: there are fewer, or no stage at all.
    """
    if stages < 1:
        raise ValueError(f"stages={stages} must be at least 1")
    if num_layers < stages and not allow_empty:
        raise ValueError(
            f"{num_layers} layers do not fill {stages} stages; use at most {num_layers} stages "
            "(a smaller pipe axis), split the layers further, or allow_empty=True"
        )


def _integers(costs: Iterable[Any]) -> list[int]:
    """Return costs times a common factor that makes all of them whole."""
    ratios = []
    for layer, cost in enumerate(costs):
        number = cost.item() if hasattr(cost, "item") else cost  # NumPy's and JAX's scalars
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"layer {layer} costs {number}; a cost is finite, and 0 or more")
        ratios.append(number.as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _bottleneck(starts: list[int], stages: int) -> int:
    """Return the cost of the heaviest stage of the best cut, by bisection."""
    heaviest = max(end - start for start, end in itertools.pairwise(starts))
    low, high = max(heaviest, -(-starts[-1] // stages)), starts[-1]
    while low < high:
        middle = (low + high) // 2
        first = 0
        for _ in range(stages):
            first = _reach(starts, first, middle)
        low, high = (low, middle) if first == len(starts) - 1 else (middle + 1, high)
    return low


def _reach(starts: list[int], first: int, bottleneck: int) -> int:
    """Return where a stage from layer `first` on ends at the latest."""
    return bisect.bisect_right(starts, starts[first] + bottleneck) - 1


def _least_squares(starts: list[int], stages: int, bottleneck: int) -> list[int]:
    """Return the cut with the smallest sum of squares whose stages stay within the bottleneck.

    Dynamic programming over suffixes: `least[i]` is the sum of squares of the layers from i on, cut
    into as many stages as were added so far. The squared cost of a stage satisfies the quadrangle
    inequality, one above the bottleneck counting as infinite, so that the best end of a stage never
    moves back when its start moves on: the middle start bounds where the others have to look.
    """
    num_layers = len(starts) - 1
    reach = [_reach(starts, first, bottleneck) for first in range(num_layers)]
    least = {num_layers: 0}
    ends: list[dict[int, int]] = []  # of the first stage, by its start; for 1, 2, ... stages

    for _ in range(stages):
        below = least
        least, end_of = {}, {}
        # What can be cut into one stage more: each of its layers alone, or as the bottleneck lets.
        last = max(below) - 1
        first = next(i for i in range(num_layers) if reach[i] >= min(below))
        open_ranges = [(first, last, min(below), max(below))]
        while open_ranges:
            first, last, low, high = open_ranges.pop()
            if first > last:
                continue
            i = (first + last) // 2
            candidates = range(min(reach[i], high), max(i + 1, low) - 1, -1)  # ties: the latest
            end = min(candidates, key=lambda j: (starts[j] - starts[i]) ** 2 + below[j])
            least[i] = (starts[end] - starts[i]) ** 2 + below[end]
            end_of[i] = end
            open_ranges += [(first, i - 1, low, end), (i + 1, last, end, high)]
        ends.append(end_of)

    boundaries = [0]
    for end_of in reversed(ends):
        boundaries.append(end_of[boundaries[-1]])
    return boundaries
