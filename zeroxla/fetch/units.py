"""Units: groups of leaves that are gathered together.

By default a unit is about one block of the model, found as the longest repetition in the shapes of
the leaves in order of first use. Their names are not read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

Shape = tuple[int, ...]

# For models in which nothing repeats: 4 Mi elements, 8 MB in bfloat16, fill a fast link.
DEFAULT_UNIT_ELEMENTS = 2**22
# Smaller blocks are joined: below this a collective costs its latency, not its bytes.
MIN_UNIT_ELEMENTS = 2**15


@dataclasses.dataclass(frozen=True, slots=True)
class Repetition:
    """`count` times the same `period` shapes, from index `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


def find_repetition(shapes: Sequence[Shape]) -> Repetition | None:
    """Return the repetition that covers the most elements, the shortest period among equals.

    >>> find_repetition([(9, 4), (4, 4), (4,), (4, 4), (4,), (4, 9)])
    Repetition(start=1, period=2, count=2)
    """
    sizes = [math.prod(s) for s in shapes]
    before = [0]
    for size in sizes:
        before.append(before[-1] + size)
    best, best_key = None, (0, 0)
    for period in range(1, len(shapes) // 2 + 1):
        run = 0  # length of the current stretch of positions i with shapes[i] == shapes[i + period]
        for i in range(len(shapes) - period + 1):
            if i + period < len(shapes) and shapes[i] == shapes[i + period]:
                run += 1
                continue
            count = run // period + 1
            if count > 1:
                start = i - run
                covered = before[start + period * count] - before[start]
                if (covered, -period) > best_key:
                    best, best_key = Repetition(start, period, count), (covered, -period)
            run = 0
    return best


def default_unit_elements(shapes: Sequence[Shape]) -> int:
    """Return the number of elements in the repeated block, or the stated default."""
    found = find_repetition(shapes)
    if found is None:
        return DEFAULT_UNIT_ELEMENTS
    block = sum(math.prod(s) for s in shapes[found.start : found.start + found.period])
    return max(block, MIN_UNIT_ELEMENTS)


def unit_of_each(shapes: Sequence[Shape], unit_elements: int | None) -> list[int]:
    """Assign leaves, given in order of first use, to consecutive units.

    Args:
      shapes: the shapes of the leaves.
      unit_elements: a unit is closed before it would exceed this. None cuts at the boundaries of
        the repeated block.

    Returns:
      The unit of each leaf: 0, 0, 1, ...
    """
    sizes = [math.prod(s) for s in shapes]
    found = find_repetition(shapes) if unit_elements is None else None
    limit = default_unit_elements(shapes) if unit_elements is None else unit_elements
    cuts: set[int] = set()
    if found is not None:
        block = sum(sizes[found.start : found.start + found.period])
        joined = found.period * max(1, MIN_UNIT_ELEMENTS // block)
        cuts = {*range(found.start, found.stop, joined), found.stop}
    units: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        inside = found is not None and found.start <= i < found.stop
        too_full = not inside and filled + size > limit
        if units and filled and (i in cuts or too_full):
            units.append(units[-1] + 1)
            filled = size
        else:
            units.append(units[-1] if units else 0)
            filled += size
    return units
