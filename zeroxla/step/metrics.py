"""The metrics of a loss: their names, and their means over devices and micro-batches.

If a masked loss returns `metrics["weight"]`, the number of items that it counted, means are
weighted by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Names of a step's own metrics.
_RESERVED = frozenset(
    {
        "examples_per_s",
        "finite",
        "grad_norm",
        "learning_rate",
        "loss",
        "loss_scale",
        "skipped",
        "tokens_per_s",
    }
)


def check_metrics(result: Any) -> None:
    """Raise a ValueError if a loss's metrics have names that the step uses for its own metrics.

    Args:
      result: tree structure of (loss, metrics, model_state).
    """
    _, metrics, _ = result.unflatten(range(result.num_leaves))
    if taken := sorted(_RESERVED.intersection(metrics)):
        raise ValueError(f"the loss returns metrics named {taken}; the step uses these: rename")


def weight_of(metrics: Mapping[str, jax.Array]) -> jax.Array:
    """Return the number of items that a loss counted, float32: `metrics["weight"]`, or 1."""
    return jnp.asarray(metrics.get("weight", 1.0), jnp.float32)


def weighted(loss: jax.Array, metrics: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the loss and metrics times their weight, and the weight; these may be summed. What has
    no weight adds nothing, even if its means are 0/0."""
    weight = weight_of(metrics)
    own = {name: x for name, x in metrics.items() if name != "weight"}
    scaled = {n: x.astype(jnp.float32) * weight for n, x in {**own, "loss": loss}.items()}
    return {**{n: jnp.where(weight == 0, 0, x) for n, x in scaled.items()}, "weight": weight}


def counts(metrics: Mapping[str, jax.Array]) -> jax.Array | None:
    """Return whether a loss counted anything; None if it does not say what it counted."""
    return weight_of(metrics) != 0 if "weight" in metrics else None


def means(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the means, from sums of results of `weighted`."""
    return {name: x / sums["weight"] for name, x in sums.items() if name != "weight"}
