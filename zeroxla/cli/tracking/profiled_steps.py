"""`ProfiledSteps`: which steps of a run are profiled."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class ProfiledSteps:
    """The steps from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def of(cls, text: str, steps: int) -> ProfiledSteps:
        """Read "FIRST:LAST".

        Args:
          text: the value of `--profile`.
          steps: the number of the run's last step.

        Raises:
          ValueError: it has another form, or names steps that the run does not take.
        """
        found = re.fullmatch(r"(\d+):(\d+)", text)
        first, last = map(int, found.groups()) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"--profile {text!r}: give two step numbers from 1 on, the smaller one first, such "
                "as 10:12"
            )
        if last > steps:
            raise ValueError(
                f"--profile {text}: the run ends after step {steps}; name earlier steps, or give "
                "more --steps"
            )
        return cls(first, last)
