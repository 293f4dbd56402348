"""How fast steps follow each other."""

from __future__ import annotations

import time
from typing import Any

import jax


class Rates:
    """Counts what a step has seen since the one before.

    Attributes:
      last: when that was called, in seconds; None before the first.
    """

    def __init__(self) -> None:
        self.last: float | None = None

    def since_last(self, batch: Any) -> dict[str, float]:
        """Return `examples_per_s`, and `tokens_per_s` of batches with `tokens`; {} at first."""
        now, last = time.perf_counter(), self.last
        self.last = now
        if last is None:
            return {}
        rates = {"examples_per_s": jax.tree.leaves(batch)[0].shape[0] / (now - last)}
        if isinstance(batch, dict) and getattr(batch.get("tokens"), "ndim", 0) == 2:
            rows, length = batch["tokens"].shape
            rates["tokens_per_s"] = rows * (length - 1) / (now - last)
        return rates
