"""`KnownLengths`: which lengths are padded, and to how many elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from zeroxla.split.lengths.padded import Length

MOST_ADDED = 0.125
"""The most padding, as a share of a sequence, for a multiple that is better but not needed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KnownLengths:
    """What is known of lengths while a program runs on padded arrays.

    Attributes:
      divisor: a length that it divides needs no padding. Shorter dims are no sequences.
      multiples: other lengths are padded to a multiple of the first of them that adds at most
        `MOST_ADDED`; the last is the divisor.
      wanted: the lengths that are worth padding; None for all.
      used: the padded lengths along which a product was split; is extended.
      moves: the equations that were replaced; is extended.
      made: by their size, lengths that arrays made of nothing may have; is extended.
    """

    divisor: int
    multiples: Sequence[int]
    wanted: Collection[int] | None = None
    used: set[int] = dataclasses.field(default_factory=set)
    moves: list[str] = dataclasses.field(default_factory=list)
    made: dict[int, Length] = dataclasses.field(default_factory=dict)

    def is_long(self, size: int) -> bool:
        """Return whether a dim may be a sequence."""
        return size > self.divisor

    def of(self, size: int) -> Length:
        """Return the length of a sequence."""
        is_wanted = self.wanted is None or size in self.wanted
        if size % self.divisor == 0 or not is_wanted:
            return Length(size, size)
        options = [-(-size // n) * n for n in self.multiples]
        few = (held for held in options if held <= size * (1 + MOST_ADDED))
        return self.noted(Length(size, next(few, options[-1])))

    def noted(self, length: Length) -> Length:
        """Return a length; it is noted for arrays that are made of nothing."""
        if length.is_padded:
            self.made.setdefault(length.size, dataclasses.replace(length, is_made=True))
        return length
