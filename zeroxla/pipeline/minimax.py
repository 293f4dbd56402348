"""Cuts a list of costs into stages so that the heaviest stage is as light as possible.

DeepSpeed minimises the difference between its heaviest and its lightest stage instead, which can
leave a heavier one.

The boundaries of P stages are P + 1 indices. Stage s holds the layers from `boundaries[s]` up to,
but not including, `boundaries[s + 1]`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from typing import Any


def balanced(costs: Iterable[Any], stages: int, *, allow_empty: bool = False) -> list[int]:
    """Cut layers into stages so that the heaviest stage is as light as possible.

    Several cuts may reach this. Of these, the one with the smallest sum of squared stage costs is
    taken. If there are still several, the one whose first cut is latest is taken, then the one
    whose second cut is latest, and so on; so a layer that costs nothing stays with the layer before
    it. If no layer costs anything, all count the same.

    Args:
      costs: the cost of each layer, an integer or float of 0 or more.
      stages: the number of stages, P.
      allow_empty: if there are fewer layers than stages, leave the last stages empty. Otherwise no
        stage is ever empty, because an empty stage makes no other stage lighter.

    Returns:
      P + 1 boundaries.

    Raises:
      ValueError: a cost is negative or not finite, or there are fewer layers than stages.

    All sums and comparisons are exact: floats are taken as the binary fractions that they are.

    Cost: O(P N log N) steps of Python for N layers; under a second for 1000 layers and 64 stages.

    >>> balanced([5, 1, 1, 1, 1, 1], 2)
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
    """Give every stage the same number of layers.

    If the number does not divide, the first stages have one layer more. If there are fewer layers
    than stages, the last stages are empty. The boundaries are DeepSpeed's.

    >>> uniform(22, 4)
    [0, 6, 12, 17, 22]
    """
    check_stages(num_layers, stages, allow_empty=True)
    each, more = divmod(num_layers, stages)
    return [stage * each + min(stage, more) for stage in range(stages + 1)]


def check_stages(num_layers: int, stages: int, allow_empty: bool) -> None:
    """Check that every stage can have a layer, unless empty ones are allowed.

    Raises:
      ValueError: there are fewer layers than stages, or there is no stage.
    """
    if stages < 1:
        raise ValueError(f"stages={stages} must be at least 1")
    if num_layers < stages and not allow_empty:
        raise ValueError(
            f"{num_layers} layers do not fill {stages} stages; use at most {num_layers} stages "
            "(a smaller pipe axis), split the layers further, or allow_empty=True"
        )


def _integers(costs: Iterable[Any]) -> list[int]:
    """Return the costs, multiplied by a common factor that makes all of them whole numbers."""
    ratios = []
    for layer, cost in enumerate(costs):
        number = cost.item() if hasattr(cost, "item") else cost  # NumPy's and JAX's scalars
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"layer {layer} costs {number}; a cost is finite, and 0 or more")
        ratios.append(number.as_integer_ratio())
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _bottleneck(starts: list[int], stages: int) -> int:
    """Return the cost of the heaviest stage in the best cut, found by bisection.

    Args:
      starts: the sum of the costs before each layer, and at the end the sum of all.
      stages: the number of stages.
    """
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
    """Return the latest end of a stage that begins with layer `first`."""
    return bisect.bisect_right(starts, starts[first] + bottleneck) - 1


def _least_squares(starts: list[int], stages: int, bottleneck: int) -> list[int]:
    """Return the cut with the smallest sum of squares whose stages stay within the bottleneck.

    This is dynamic programming over suffixes: `least[i]` is the smallest sum of squares of the
    layers from i on, cut into as many stages as were added so far. The squared cost of a stage
    satisfies the quadrangle inequality, if a stage above the bottleneck counts as infinite. So the
    best end of a stage never moves back when its start moves on, and the middle start bounds the
    range that the other starts must search.
    """
    num_layers = len(starts) - 1
    reach = [_reach(starts, first, bottleneck) for first in range(num_layers)]
    least = {num_layers: 0}
    ends: list[dict[int, int]] = []  # for 1, 2, ... stages: the first one's end, by its start

    for _ in range(stages):
        below = least
        least, end_of = {}, {}
        # The starts from which one stage more reaches a suffix that is cut already.
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
