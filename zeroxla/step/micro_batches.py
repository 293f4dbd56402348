"""How the rows of one device are cut into micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def micro_batches(batch: Any, key: jax.Array, count: int) -> tuple[Any, jax.Array]:
    """Cut a device's rows into micro-batches.

    Returns:
      The rows, each array with a new leading dim of length `count`; and a key for each micro-batch,
      the same on all devices.
    """
    rows = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
    return rows, jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def num_evaluated(num_rows: int, at_most: int) -> int:
    """Return the number of micro-batches in which a pipeline evaluates the rows of a device: the
    largest that divides them.

    Args:
      num_rows: the number of rows.
      at_most: the number of micro-batches of a training step.
    """
    return max(n for n in range(1, at_most + 1) if num_rows % n == 0)
