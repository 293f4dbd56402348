"""Counts the targets of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def count_targets(batch: Any) -> dict[str, jax.Array]:
    """Return the number of targets that count, of a whole placed batch, as the metric "targets". A
    batch without a mask has no such metric."""
    return {"targets": _num_nonzero(batch["mask"])} if "mask" in batch else {}


@jax.jit
def _num_nonzero(x: jax.Array) -> jax.Array:
    return (x != 0).sum(dtype=jnp.int32)
