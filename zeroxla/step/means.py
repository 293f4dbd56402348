"""Turns sums over micro-batches into means over all devices, at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.step.metrics import means
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Layout
from zeroxla.wire.vectors import as_vector, from_vector


def means_over_devices(
    grads: Sequence[jax.Array | None],
    sums: Any,
    scale: jax.Array,
    *,
    layout: Layout,
    collectives: Collectives,
) -> tuple[list[jax.Array | None], dict[str, Any]]:
    """Turn a step's sums into means, with one collective for all scalars.

    Args:
      grads: this device's shards of the summed gradients; None for frozen leaves.
      sums: this device's weighted sums of the loss and its metrics.
      scale: the loss scale.
      layout: the model's leaves.
      collectives: the collectives of all devices, those of other stages included.

    Returns:
      Shards of the mean gradient, and the metrics: `loss`, `grad_norm`, `finite`, and the model's
      own.
    """
    squares = bad = jnp.zeros((), jnp.float32)
    for grad, leaf in zip(grads, layout, strict=True):
        if grad is not None:
            held = leaf.placement.dim is None
            share = 1 / collectives.num_holders(leaf.placement.axes) if held else 1
            squares += share * jnp.sum(jnp.square(grad))
            bad += jnp.sum(~jnp.isfinite(grad), dtype=jnp.float32)
    here = (jax.tree.map(collectives.once, sums), squares, bad)
    total, squares, bad = from_vector(collectives.sum_everywhere(as_vector(here)), here)
    divide = 1 / (total["weight"] * scale)
    metrics = means(total)
    metrics["grad_norm"] = jnp.sqrt(squares) * divide
    metrics["finite"] = (bad == 0) & jnp.isfinite(metrics["loss"])
    return [None if g is None else g * divide for g in grads], metrics


def mean_metrics(sums: dict[str, jax.Array], collectives: Collectives) -> dict[str, jax.Array]:
    """Return the means over all devices of a loss and its metrics, with one collective.

    Args:
      sums: this device's weighted sums, as `weighted` gives them.
      collectives: the collectives of all devices.
    """
    return means(from_vector(collectives.sum(as_vector(sums)), sums))
