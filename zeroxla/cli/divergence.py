"""`Divergence`: watches a run for steps that change nothing, and ends one that learns no more.

A step whose loss or gradient is not finite is skipped: it changes no parameter. One such step may
be a bad batch, and float16 skips some on purpose, to find its loss scale. Many in a row mean that
the parameters themselves have left the range of numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from zeroxla.cli.errors import DivergedError

REMEDY = "lower the learning rate, or look at the data of the first step that was skipped"


@dataclasses.dataclass(kw_only=True, slots=True)
class Divergence:
    """Counts skipped steps, warns about them, and raises an error after too many in a row.

    Attributes:
      limit: the number of skipped steps in a row that ends a run; 0 for never.
      warn: prints a warning.
      unit: what is counted, in a word: "step".
      skipped: the number of steps up to now that were skipped, without a break.
      is_bad: whether the loss of the present parameters is not finite. Such a state is not worth a
        checkpoint.
    """

    limit: int
    warn: Callable[[str], None]
    unit: str = "step"
    skipped: int = 0
    is_bad: bool = False
    _has_warned: bool = False

    def took(
        self, number: int, *, finite: bool, loss: float, scaled: bool = False, steps: int = 1
    ) -> None:
        """Take note of a step.

        Args:
          number: the step's number, for messages.
          finite: whether its loss and its gradient were finite, so that it was not skipped.
          loss: its loss.
          scaled: whether the loss is scaled: then a gradient may overflow beside a finite loss.
          steps: the number of steps that are noted at once.

        Raises:
          DivergedError: this makes `limit` in a row.
        """
        if finite:
            self.skipped, self.is_bad = 0, False
            return
        before, self.skipped = self.skipped, self.skipped + steps
        self.is_bad = not math.isfinite(loss)
        what = "loss" if self.is_bad else "gradient"
        if 0 < self.limit <= self.skipped:
            raise DivergedError(
                f"{self.unit} {number}: the {what} is not finite, and {self.skipped} steps in a "
                f"row were skipped (--max-skipped {self.limit}); {REMEDY}"
            )
        expected = scaled and not self.is_bad
        half = self.limit // 2
        if not expected and not self._has_warned:
            self._has_warned = True
            end = f"{self.limit} such steps in a row end the run" if self.limit else "it goes on"
            self.warn(f"{self.unit} {number} was skipped: its {what} is not finite; {end}")
        elif before < half <= self.skipped:
            self.warn(
                f"{self.skipped} steps in a row were skipped up to {self.unit} {number}: the "
                f"{what} is not finite; {self.limit} end the run"
            )

    def evaluated(self, number: int, loss: float) -> None:
        """Take note of the loss of the present parameters on other data."""
        if not math.isfinite(loss):
            self.is_bad = True
            self.warn(f"{self.unit} {number}: the validation loss is not finite")

    def may_save(self, number: int) -> bool:
        """Return whether the present state is worth a checkpoint; say so if it is not."""
        if self.is_bad:
            self.warn(
                f"no checkpoint of {self.unit} {number}: its loss is not finite; the one before "
                "stays"
            )
        return not self.is_bad

    def check_end(self, number: int) -> None:
        """Check that the state with which a run ends is worth a checkpoint.

        Raises:
          DivergedError: the loss of its parameters is not finite.
        """
        if self.is_bad:
            raise DivergedError(
                f"{self.unit} {number}: the run ends with a loss that is not finite; {REMEDY}"
            )
