"""Finds repetitions in a sequence of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """A stretch of a sequence that equals itself, moved by `period`.

    It holds `count` equal blocks, which may begin at `start` or at any of the `slack` places after.

    Attributes:
      start: the first index of the stretch.
      period: the length of a block.
      count: the number of blocks, at least 2.
      slack: how much longer the stretch is than `count` blocks, less than `period`.
    """

    start: int
    period: int
    count: int
    slack: int

    @property
    def saved(self) -> int:
        """The number of elements in all blocks but the first."""
        return (self.count - 1) * self.period


def repeats(keys: Sequence[int]) -> Iterator[Repeat]:
    """Yield the repetitions of a sequence: those that save the most first, then short periods.

    Cost: N²/4 comparisons of NumPy for N keys, and memory for one repetition of each period.

    >>> next(repeats([7, 1, 2, 1, 2, 1, 3]))
    Repeat(start=1, period=2, count=2, slack=1)
    """
    given = np.asarray(keys)
    found: list[Repeat] = []
    for period in range(1, len(given) // 2 + 1):
        same = np.concatenate(([False], given[period:] == given[:-period], [False]))
        begins = np.flatnonzero(~same[:-1] & same[1:])
        lengths = np.flatnonzero(same[:-1] & ~same[1:]) - begins
        for start, length in zip(begins.tolist(), lengths.tolist()):
            if length >= period:
                count = length // period + 1
                found.append(Repeat(start, period, count, length % period))
    yield from sorted(found, key=lambda r: (-r.saved, r.period, r.start))
