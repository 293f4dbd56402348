"""`Case`: a model of the zoo with its data; and the batches that cases share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CASES: dict[str, Case] = {}
"""Every case by name, in order of definition."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One model with its data.

    Attributes:
      name: the name of the case.
      make: returns the model (a linen module, `lambda rngs: nnx module`, or a pair).
      batch: makes a batch of NumPy arrays with a number of rows.
      loss: the `loss=` argument of make_step.
      frozen: patterns of leaves that get no gradient.
      local: returns the model without averages over devices, for a model that averages over them
        itself. Its loss of the whole batch is then the reference, instead of the mean over the
        devices' slices.
      unit_elements: a unit size that cuts this model into several units.
      heavy: whether it takes seconds to compile; then it is left to the slow tests, with one row.
      rounds: whether each device rounds its gradients before they are summed. Devices along
        `expert` have other rows, so the reference rounds the gradients of as many slices.
      rows: number of rows of a device's micro-batch. Batch statistics of two rows are all but
        singular: the normalised values are 1 and -1 whatever the leaves.
    """

    name: str
    make: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[..., Any] | None = None
    frozen: Sequence[str] = ()
    local: Callable[[], Any] | None = None
    unit_elements: int = 64
    heavy: bool = False
    rounds: bool = False
    rows: int = 2

    @property
    def whole_batch(self) -> bool:
        """Whether the reference is the loss of the whole batch."""
        return self.local is not None

    def reference_model(self) -> Any:
        """Return the model as it is on one device."""
        return (self.local or self.make)()


def case(batch: Callable[[int], Any], **options: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function, which returns the model, as a case of its own name."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        assert make.__name__ not in CASES, make.__name__
        CASES[make.__name__] = Case(name=make.__name__, make=make, batch=batch, **options)
        return make

    return register


def vectors(rows: int, width: int = 6) -> dict[str, np.ndarray]:
    """Return {"x": float32[rows, width], "y": float32[rows, 3]}."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    y = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": y}


def tokens(rows: int, length: int = 7, vocab: int = 64) -> dict[str, np.ndarray]:
    """Return {"tokens": int32[rows, length + 1]}."""
    return {"tokens": np.random.default_rng(rows).integers(0, vocab, (rows, length + 1), np.int32)}


def masked_tokens(rows: int) -> dict[str, np.ndarray]:
    """Return tokens and a "mask" [rows, 7], which counts another number of targets in each row, and
    none in some rows."""
    mask = np.arange(7)[None, :] < (np.arange(rows) * 3 % 8)[:, None]
    return {**tokens(rows), "mask": mask.astype(np.int32)}


def images(rows: int, size: int = 8) -> dict[str, np.ndarray]:
    """Return {"image": float32[rows, size, size, 3], "label": int32[rows]}."""
    rng = np.random.default_rng(rows)
    image = rng.normal(size=(rows, size, size, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 10, rows, np.int32)}


def series(rows: int, length: int = 5, width: int = 6) -> dict[str, np.ndarray]:
    """Return {"x": float32[rows, length, width], "y": float32[rows, 3]}."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, length, width)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(rows, 3)).astype(np.float32)}


def mse(prediction: jax.Array, target: jax.Array) -> jax.Array:
    """Return the mean squared difference."""
    return jnp.mean(jnp.square(prediction - target))


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Return a float32 leaf, scaled like a layer's kernel."""
    return jax.random.normal(key, shape) * (1 if len(shape) < 2 else max(1, shape[-2])) ** -0.5


def leaves(**shapes: tuple[int, ...]) -> Callable[[jax.Array, Any], dict[str, jax.Array]]:
    """Return `init(key, batch)` that makes one normal leaf for each name."""

    def init(key: jax.Array, batch: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return {name: normal(k, *shape) for k, (name, shape) in zip(keys, shapes.items())}

    return init
