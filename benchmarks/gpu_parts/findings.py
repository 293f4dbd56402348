"""The results of a part: measured figures, and programs for a GPU that is absent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
      name: the name of the measured figure or of the compiled program.
      text: the result as it is shown.
      value: the number behind the text; None if there is none.
      limit: the most that `value` may be; None if the figure has no bound.
      failed: whether this line makes the command fail whatever the value is: a program that did not
        compile, or a case that did not run.
    """

    name: str
    text: str
    value: float | None = None
    limit: float | None = None
    failed: bool = False

    @property
    def passed(self) -> bool:
        """Whether the figure keeps its bound. A NaN keeps none."""
        if self.failed:
            return False
        return self.limit is None or (self.value is not None and self.value <= self.limit)


def bounded(name: str, value: float, limit: float) -> Finding:
    """Return a figure with a bound."""
    return Finding(name=name, text=f"{value:.3g}", value=float(value), limit=limit)


def ratio(name: str, value: float) -> Finding:
    """Return a ratio of two times or sizes of one run, which has no bound."""
    return Finding(name=name, text=f"{value:.2f}x", value=float(value))


def megabytes(name: str, num_bytes: float) -> Finding:
    """Return bytes; a MB has 10^6 of them."""
    return Finding(name=name, text=f"{num_bytes / 1e6:,.1f} MB", value=float(num_bytes))


class NotHereError(Exception):
    """A program that this JAX cannot make for a GPU that is not there; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that a part would run.

    Attributes:
      name: its name in the table.
      lower: lowers it.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]


def largest_error(found: Any, expected: Any) -> float:
    """Return the largest difference of two pytrees of arrays, over the largest magnitude of the
    expected leaf; the worst leaf counts. It is NaN where a difference is."""
    errors = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        errors.append(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))
    return float(np.max(errors))
