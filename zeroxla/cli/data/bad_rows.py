"""`BadRows`: counts the rows that cannot be trained on, and names them with what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable

NUM_NAMED = 20
"""The number of bad rows that are reported one by one."""


class RowError(ValueError):
    """A row cannot be trained on; the text says why."""


class BadRows:
    """Counts bad rows, and stops when there are too many.

    Args:
      limit: the largest share of all rows that may be bad, between 0 and 1.
      report: called with a sentence for each of the first `NUM_NAMED` bad rows, and once more when
        the next ones are counted only.

    Attributes:
      rows: the number of all rows that have been looked at while files were read.
      found: the place of each bad row, and what is wrong with it.

    Threads may share it.

    >>> bad = BadRows(limit=1.0, report=print)
    >>> bad.add("chat.jsonl:3", "the row is no JSON object")
    chat.jsonl:3: the row is no JSON object
    >>> bad.found
    {'chat.jsonl:3': 'the row is no JSON object'}
    """

    def __init__(self, limit: float, report: Callable[[str], None]) -> None:
        if not 0 <= limit <= 1:
            raise ValueError(f"a share of {limit} bad rows must lie between 0 and 1; 0.01 is usual")
        self.limit, self.rows = limit, 0
        self.found: dict[str, str] = {}
        self._report, self._lock = report, threading.Lock()

    def add(self, place: str, reason: str) -> None:
        """Count a bad row, if it has not been counted before, and name it.

        Args:
          place: the file and the line.
          reason: what is wrong.
        """
        with self._lock:
            if place in self.found:
                return
            self.found[place] = reason
            number = len(self.found)
        if number <= NUM_NAMED:
            self._report(f"{place}: {reason}")
        elif number == NUM_NAMED + 1:
            self._report(f"more than {NUM_NAMED} bad rows; the next ones are counted, not named")

    def check(self) -> None:
        """Check that not too many rows are bad.

        Raises:
          ValueError: their share is above the limit. The text names the first ones.
        """
        with self._lock:
            number, rows = len(self.found), self.rows
            first = list(self.found.items())[:3]
        if number > self.limit * rows:
            named = "; ".join(f"{place}: {reason}" for place, reason in first)
            raise ValueError(
                f"{number} of {rows} rows are bad, more than the share of {self.limit} that may be "
                f"({named}); mend the rows, or allow more with a larger --max-bad-rows"
            )

    @property
    def summary(self) -> str:
        """A few words about the bad rows, for a sentence about the data."""
        return f"{len(self.found):,} bad rows"
