"""The GPTs that the parts train, their batches, and plain training steps of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import GPT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A GPT and its batch.

    Attributes:
      layers, width, heads, vocab, length: as `GPT` takes them.
      rows: sequences of a device.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    length: int
    rows: int

    def model(self, **options: Any) -> GPT:
        """Return the model, scanned."""
        shape = dataclasses.asdict(self)
        del shape["rows"]
        return GPT(**shape, **options)

    def tokens(self, devices: int) -> dict[str, np.ndarray]:
        """Return a batch of random sequences for so many devices, always the same one."""
        shape = (self.rows * devices, self.length + 1)
        rng = np.random.default_rng(0)
        return {"tokens": rng.integers(0, self.vocab, shape, dtype=np.int32)}

    def text(self) -> str:
        """Return the size in words."""
        return (
            f"GPT of {self.layers} layers, width {self.width}, vocabulary {self.vocab}, "
            f"{self.rows} x {self.length} tokens a device"
        )


SMALL = Size(layers=2, width=64, heads=4, vocab=128, length=32, rows=2)
OPTIMIZER = optax.adamw(1e-4)


class Run:
    """A step in training: each call takes a step and returns its seconds."""

    def __init__(self, step: zeroxla.Step, batch: Any) -> None:
        self.step, self.batch = step, batch
        self.state = step.init(jax.random.key(0), batch)
        self.losses: list[float] = []

    def __call__(self) -> float:
        begin = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        self.losses.append(float(metrics["loss"]))
        jax.block_until_ready(jax.tree.leaves(self.state.params))
        return time.perf_counter() - begin


def plain_gradients(model: Any, params: Any, batch: Any) -> tuple[float, Any]:
    """Return loss and gradients of the unsharded model by `jax.value_and_grad`, on one device."""
    adapted = adapt(model)

    def loss(params: Any, batch: Any) -> jax.Array:
        return adapted.loss(params, {}, batch, jax.random.key(0), train=True)[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(params, jax.tree.map(jnp.asarray, batch))
    return float(value), jax.device_get(grads)


def median_ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Return the median over turns of one run's time over another's."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))
