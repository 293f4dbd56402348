"""`Rates`: examples and tokens per second between steps."""

from __future__ import annotations

import time
from typing import Any

import jax


class Rates:
    """Measures the rate of examples and tokens from one step to the next.

    Attributes:
      last: the time of the last call, in seconds. None before the first call.
    """

    def __init__(self) -> None:
        self.last: float | None = None

    def since_last(self, batch: Any) -> dict[str, float]:
        """Return `examples_per_s`, and `tokens_per_s` for batches with `tokens`; {} at the first
        call."""
        now, last = time.perf_counter(), self.last
        self.last = now
        if last is None:
            return {}
        rates = {"examples_per_s": jax.tree.leaves(batch)[0].shape[0] / (now - last)}
        if isinstance(batch, dict) and getattr(batch.get("tokens"), "ndim", 0) == 2:
            rows, length = batch["tokens"].shape
            rates["tokens_per_s"] = rows * (length - 1) / (now - last)
        return rates
