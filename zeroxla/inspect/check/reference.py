"""The unsharded loss and gradients of a model: of the whole batch, and of the devices' rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.program.primitives import COLLECTIVES
from zeroxla.program.trace import Program
from zeroxla.program.walk import walk
from zeroxla.step.metrics import weight_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """A loss and its gradients, as float32 arrays of NumPy in the order of the leaves."""

    loss: float
    leaves: list[np.ndarray]

    def errors(self, expected: Gradients) -> list[float]:
        """Return the error of each leaf, relative to its norm in `expected`.

        A norm counts as at least a thousandth of all leaves' norm: leaves whose exact gradient is
        zero, such as a bias before a norm, hold rounding errors alone. NaN counts as infinity.
        """
        norms = [_norm(x) for x in expected.leaves]
        least = max(1e-3 * _norm(np.asarray(norms)), 1e-30)
        found = []
        for mine, other, norm in zip(self.leaves, expected.leaves, norms, strict=True):
            difference = _norm(mine - other)
            found.append(difference / max(norm, least) if np.isfinite(difference) else np.inf)
        return found

    def loss_error(self, expected: Gradients) -> float:
        """Return the error of the loss, relative to the one of `expected`."""
        difference = abs(self.loss - expected.loss)
        return difference / max(abs(expected.loss), 1e-12) if np.isfinite(difference) else np.inf

    @property
    def is_finite(self) -> bool:
        """Whether neither the loss nor any gradient is infinite or NaN."""
        return bool(np.isfinite(self.loss)) and all(np.isfinite(x).all() for x in self.leaves)


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))


def has_collectives(program: Program) -> bool:
    """Return whether a loss exchanges something between devices, or asks which one it runs on."""
    names = COLLECTIVES | {"axis_index"}
    return any(visit.equation.name in names for visit in walk(program, "cpu"))


def unsharded(checked: CheckedModel, *, train: bool, slices: bool) -> Gradients:
    """Compute loss and gradients on one device, without zeroxla's placement of anything.

    Args:
      checked: the model.
      train: the argument of the model's loss.
      slices: whether to take the mean over the slices of the batch that the devices (and their
        micro-batches) are given, each under the key that a step promises it:
        fold_in(fold_in(fold_in(state.key, step), micro-batch), device). Otherwise the batch is one.

    Cost: one compilation of the loss and its gradient.
    """
    loss = checked.losses(jnp.float32)[train]
    is_trained = [not leaf.frozen for leaf in checked.layout]
    micro = checked.step.config.num_micro_batches
    world = checked.num_slices // micro

    def gradients(params: Any, state: Any, rows: Any, key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(params)

        def of_trained(trained: list[jax.Array]) -> Any:
            given = iter(trained)
            own = [next(given) if t else x for x, t in zip(leaves, is_trained, strict=True)]
            value, metrics, new = loss(tree.unflatten(own), state, rows, key)
            weight = jax.lax.stop_gradient(weight_of(metrics))
            value = value.astype(jnp.float32) * weight
            return jnp.where(weight == 0, 0, value), (weight, new)

        trained = [x for x, t in zip(leaves, is_trained, strict=True) if t]
        (value, (weight, new)), grads = jax.value_and_grad(of_trained, has_aux=True)(trained)
        grads = [jnp.where(weight == 0, 0, g) for g in grads]  # of 0/0, NaN
        return (value, weight, grads), new

    def run(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        def of_device(x: Any) -> Any:
            rank, rows = x

            def of_micro_batch(state: Any, x: Any) -> Any:
                i, rows = x
                own = jax.random.fold_in(jax.random.fold_in(key, i), rank)
                sums, new = gradients(params, state, rows, own)
                return new, sums

            return jax.lax.scan(of_micro_batch, state, (jnp.arange(micro), rows))[1]

        def cut(x: jax.Array) -> jax.Array:
            return x.reshape(world, micro, x.shape[0] // (world * micro), *x.shape[1:])

        if slices:
            parts = jax.lax.map(of_device, (jnp.arange(world), jax.tree.map(cut, batch)))
            value, weight, grads = jax.tree.map(lambda x: x.sum((0, 1)), parts)
        else:
            first = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
            value, weight, grads = gradients(params, state, batch, first)[0]
        return value / weight, [g / weight for g in grads]

    key = jax.random.fold_in(checked.state.key, checked.state.step)
    device = checked.one_device.devices.flat[0]
    batch, key = jax.device_put((checked.batch, key), device)
    with checked.tracing_on_one_device():
        value, grads = jax.jit(checked.on_one_device(run))(
            checked.params, checked.model_state, batch, key
        )
    return Gradients(loss=float(value), leaves=[np.asarray(g) for g in grads])
