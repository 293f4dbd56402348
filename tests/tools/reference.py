"""An independent reference: the same training on one device, without sharding.

The loss of a step is the mean over the devices' slices of the batch (and their micro-batches),
weighted by metrics["weight"] if the model returns it. The keys are the ones that zeroxla promises:
fold_in(fold_in(fold_in(state.key, step), micro-batch), rank).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Plain training of (init, loss) on one device.

    Attributes:
      init, loss: functions as `adapt` returns them.
      world: number of devices whose slices of the batch are averaged.
      accumulate: micro-batches of each slice.
      dtype: dtype of the leaves, and of the batch's floating arrays, in the loss.
      scale: the loss scale, which keeps gradients that a narrow dtype would lose.
      is_frozen: takes a leaf's path and says whether it gets no gradient.
    """

    init: Callable[..., tuple[Tree, Tree]]
    loss: Callable[..., tuple[jax.Array, dict, Tree]]
    world: int
    accumulate: int = 1
    dtype: Any = jnp.float32
    scale: float = 1.0
    is_frozen: Callable[[str], bool] = lambda path: False

    def start(self, key: jax.Array, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        """Return (params, model state, the state's key)."""
        parts = self.world * self.accumulate
        rows = jax.tree.map(lambda x: x[: len(x) // parts], batch)
        params, model_state = jax.jit(self.init)(key, rows)
        return params, model_state, jax.random.fold_in(key, 1)

    def gradients(
        self, params: Tree, model_state: Tree, key: jax.Array, step: Any, batch: Tree
    ) -> tuple[jax.Array, dict, Tree, Tree]:
        """Return (loss, metrics, gradients, model state) of one step."""
        key = jax.random.fold_in(key, step)
        frozen = jax.tree_util.tree_map_with_path(
            lambda path, _: self.is_frozen(jax.tree_util.keystr(path, simple=True, separator="/")),
            params,
        )

        def slice_loss(params: Tree, state: Tree, rows: Tree, key: jax.Array) -> Any:
            params = jax.tree.map(lambda x, f: jax.lax.stop_gradient(x) if f else x, params, frozen)
            cast = partial(jax.tree.map, self._cast)
            loss, metrics, state = self.loss(cast(params), state, cast(rows), key, train=True)
            weight = jnp.asarray(metrics.pop("weight", 1.0), jnp.float32)
            metrics = {n: weight * x.astype(jnp.float32) for n, x in metrics.items()}
            loss = weight * loss.astype(jnp.float32)
            return loss * self.scale, (loss, weight, metrics, state)

        def rank(r: jax.Array, rows: Tree) -> Any:
            def micro(state: Tree, x: Any) -> tuple[Tree, Any]:
                i, rows = x
                own = jax.random.fold_in(jax.random.fold_in(key, i), r)
                grad = jax.value_and_grad(slice_loss, has_aux=True)
                (_, (loss, weight, metrics, state)), grads = grad(params, state, rows, own)
                return state, (loss, weight, metrics, jax.tree.map(lambda g: g / self.scale, grads))

            state, sums = jax.lax.scan(micro, model_state, (jnp.arange(self.accumulate), rows))
            return jax.tree.map(lambda x: x.sum(0), sums), state

        def split(x: jax.Array) -> jax.Array:
            size = len(x) // (self.world * self.accumulate)
            return jnp.reshape(x, (self.world, self.accumulate, size, *x.shape[1:]))

        ranks = jnp.arange(self.world)
        parts, states = jax.lax.map(lambda x: rank(*x), (ranks, jax.tree.map(split, batch)))
        loss, weight, metrics, grads = jax.tree.map(lambda x: x.sum(0), parts)
        mean = partial(jax.tree.map, lambda x: x / weight)
        return loss / weight, mean(metrics), mean(grads), jax.tree.map(_agreed, states)

    def step(
        self, optimizer: optax.GradientTransformation
    ) -> Callable[..., tuple[Tree, Tree, Tree, Any]]:
        """Return the jitted `(params, opt_state, model_state, key, step, batch) ->
        (params, opt_state, model_state, (loss, metrics, gradients))`."""

        @jax.jit
        def step(params, opt_state, model_state, key, step, batch):
            loss, metrics, grads, state = self.gradients(params, model_state, key, step, batch)
            masked = self.masked(grads)
            updates, opt_state = optax.with_extra_args_support(optimizer).update(
                masked, opt_state, self.masked(params), value=loss, grad=masked
            )
            updates = jax.tree.map(
                lambda u, p: jnp.zeros_like(p) if _is_masked(u) else u,
                updates,
                params,
                is_leaf=_is_masked,
            )
            return optax.apply_updates(params, updates), opt_state, state, (loss, metrics, grads)

        return step

    def masked(self, tree: Tree) -> Tree:
        """Return `tree` with an empty node for each frozen leaf, as optax.masked does."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: (
                optax.MaskedNode()
                if self.is_frozen(jax.tree_util.keystr(path, simple=True, separator="/"))
                else x
            ),
            tree,
        )

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _agreed(states: jax.Array) -> jax.Array:
    """Return the model state after a step: the mean of floats over ranks, and rank 0's other
    arrays."""
    return states.mean(0) if jnp.issubdtype(states.dtype, jnp.floating) else states[0]


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def relative_errors(found: Tree, expected: Tree) -> dict[str, float]:
    """Return |found - expected| / max(|expected|, 1e-3 |all expected|) of each leaf, by its path.

    Norms are Frobenius norms. The share of all is for leaves whose exact gradient is zero (a key
    bias, a bias before a BatchNorm): they hold rounding noise, and their own norm is no measure.
    """
    pairs = jax.tree_util.tree_leaves_with_path(expected)
    norms = [_norm(x) for _, x in pairs]
    least = 1e-3 * _norm(norms)
    errors = {}
    for (path, want), got, norm in zip(pairs, jax.tree.leaves(found), norms, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert got.shape == want.shape, (path, got.shape, want.shape)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        difference = _norm(got - want)
        # Also where a NaN is on either side.
        errors[name] = 0.0 if difference == 0 else difference / max(norm, least, 1e-30)
    return errors


def leaf_norms(tree: Tree) -> dict[str, float]:
    """Return the Frobenius norm of each leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _norm(x) for path, x in leaves}


def _norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """Return the leaf with the largest error, where a NaN counts as infinite; ("", 0) without
    leaves."""
    finite = [(n, float("inf") if np.isnan(e) else e) for n, e in errors.items()]
    return max(finite, key=lambda e: e[1], default=("", 0.0))


def remember_gradients() -> optax.GradientTransformation:
    """Return a transformation that changes nothing and keeps the last gradients as its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
