"""Counts what the losses of batches are means over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MASKS = ("mask", "chosen_mask", "rejected_mask")


def count_targets(batch: Any) -> dict[str, jax.Array]:
    """Return the number of targets that count, of a whole placed batch, as the metric "targets". A
    batch without a mask has no such metric."""
    masks = [batch[name] for name in _MASKS if name in batch]
    return {"targets": _num_nonzero(masks)} if masks else {}


def weight_of(rows: Mapping[str, np.ndarray]) -> int:
    """Return the number of things that the loss of a batch is a mean over: of preferences the pairs
    whose responses both have targets, otherwise the targets that count. 1 without a mask: all such
    batches are full."""
    if "chosen_mask" in rows:
        both = [rows[name].any(axis=1) for name in ("chosen_mask", "rejected_mask")]
        return int((both[0] & both[1]).sum())
    return int(np.sum(rows["mask"] != 0)) if "mask" in rows else 1


@jax.jit
def _num_nonzero(arrays: list[jax.Array]) -> jax.Array:
    return sum(((x != 0).sum(dtype=jnp.int32) for x in arrays), jnp.int32(0))
