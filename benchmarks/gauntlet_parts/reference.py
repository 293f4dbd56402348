"""The reference: the model itself under `jax.grad`, whole, on one device, without zeroxla."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import unfreeze

from gauntlet_parts.case import Built

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A model as the functions that its own library makes of it.

    Attributes:
      params: the parameters, as the library holds them.
      gradient: `(params, rows) -> (loss, gradients)` on a slice of a batch, in training.
      logits: `(params, tokens) -> logits`; None for other models.
      names: `(params) -> {path: array}`, with paths as zeroxla writes them.
    """

    params: Tree
    gradient: Callable[[Tree, Tree], tuple[jax.Array, Tree]]
    logits: Callable[[Tree, jax.Array], jax.Array] | None
    names: Callable[[Tree], dict[str, np.ndarray]]

    def gradients(self, params: Tree, batch: Tree, slices: int) -> tuple[float, Tree]:
        """Return the loss and its gradients: the mean over slices of the batch.

        Losses of whole batches would do, but for batch statistics: those of a device are of its
        own rows.
        """
        found = [self.gradient(params, rows) for rows in sliced(batch, slices)]
        mean = jax.tree.map(lambda *x: _mean(x), *found)
        return float(mean[0]), mean[1]

    def after(self, gradients: Tree, rate: float) -> Tree:
        """Return the parameters after a step of plain gradient descent. What flax overwrites with
        gradients becomes its gradient."""

        def step(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
            if _name(path).startswith(OVERWRITE_WITH_GRADIENT):
                return g
            return p - rate * jnp.conj(g) if jnp.issubdtype(p.dtype, jnp.inexact) else p

        return jax.tree_util.tree_map_with_path(step, self.params, gradients)


def _mean(parts: tuple[jax.Array, ...]) -> Any:
    if parts[0].dtype == jax.dtypes.float0:
        return parts[0]
    return sum(parts[1:], parts[0]) / len(parts)


def sliced(batch: Tree, slices: int) -> list[Tree]:
    """Return a batch's slices, as devices get them."""

    def part(i: int) -> Tree:
        return jax.tree.map(lambda x: x[i * len(x) // slices : (i + 1) * len(x) // slices], batch)

    return [part(i) for i in range(slices)]


def reference_of(built: Built, params: Tree, model_state: Tree) -> Reference:
    """Return the reference of a model.

    Args:
      built: the model.
      params: the parameters that `zeroxla.full_params` gave.
      model_state: the other collections, nested dicts with the model's own keys.
    """
    if built.reference_model is not None:
        built = dataclasses.replace(built, model=built.reference_model)
    if isinstance(built.model, nn.Module):
        return linen_reference(built, params, model_state)
    if isinstance(built.model, tuple):
        return pair_reference(built, params)
    return nnx_reference(built, params, model_state)


def linen_reference(built: Built, params: Tree, model_state: Tree) -> Reference:
    module: Any = built.model
    streams = {name: jax.random.key(9) for name in ("params", "dropout")}

    def run(module: Any, rows: Tree) -> Any:
        loss = built.loss or (lambda module, rows, train: module.loss(rows, train=train))
        return scalar(loss(module, rows, train=True))

    # As in flax's train state, these variables are differentiated with the parameters.
    overwritten = {n: c for n, c in model_state.items() if n == OVERWRITE_WITH_GRADIENT}

    def value(params: Tree, rows: Tree) -> jax.Array:
        variables = {**model_state, **params}
        return nn.apply(run, module, mutable=True)(variables, rows, rngs=streams)[0]

    def logits(params: Tree, tokens: jax.Array) -> jax.Array:
        assert built.logits is not None
        return nn.apply(built.logits, module)({**model_state, **params}, tokens)

    return Reference(
        params={"params": unfreeze(params), **overwritten},
        gradient=differentiated(value),
        logits=logits if built.logits else None,
        names=lambda found: by_path(found["params"]),
    )


def nnx_reference(built: Built, params: Tree, model_state: Tree) -> Reference:
    with nnx.use_eager_sharding(False):  # there is no mesh for what it annotates
        module = built.model(nnx.Rngs(0))
    for part in (params, model_state):
        nnx.update(module, jax.tree.map(jnp.asarray, part))
    module.train()
    graphdef, own, others = nnx.split(module, nnx.Param, ...)

    def value(own: Tree, rows: Tree) -> jax.Array:
        loss = built.loss or (lambda module, rows, train: module.loss(rows, train=train))
        module = nnx.merge(graphdef, own, others, copy=True)
        return scalar(loss(module, rows, train=True))

    def logits(own: Tree, tokens: jax.Array) -> jax.Array:
        assert built.logits is not None
        module = nnx.merge(graphdef, own, others, copy=True)
        module.eval()
        return built.logits(module, tokens)

    def names(own: Tree) -> dict[str, np.ndarray]:
        return {
            "/".join(map(str, path)): np.asarray(
                x.get_raw_value() if isinstance(x, nnx.Variable) else x
            )
            for path, x in nnx.to_flat_state(own)
        }

    return Reference(
        params=own,
        gradient=differentiated(value),
        logits=logits if built.logits else None,
        names=names,
    )


def pair_reference(built: Built, params: Tree) -> Reference:
    init, loss = built.model
    shapes = jax.eval_shape(init, jax.random.key(0), built.batch)
    flat = by_path(params)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    own = tree.unflatten([jnp.asarray(flat[_name(path) or "param"]) for path, _ in leaves])

    def value(own: Tree, rows: Tree) -> jax.Array:
        return scalar(loss(own, rows, jax.random.key(9)))

    return Reference(params=own, gradient=differentiated(value), logits=built.logits, names=by_path)


def differentiated(value: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.value_and_grad(value, allow_int=True))


def scalar(result: Any) -> jax.Array:
    """Return the loss of (loss, metrics), or of the loss alone."""
    return result[0] if isinstance(result, tuple) else result


def by_path(tree: Tree) -> dict[str, np.ndarray]:
    """Return {path: array} of a tree."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path) or "param": np.asarray(x) for path, x in found}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def real_parts(leaves: dict[str, np.ndarray], *, conjugate: bool = False) -> dict[str, np.ndarray]:
    """Return arrays with complex ones as zeroxla stores them, in two parts.

    Args:
      leaves: arrays by path.
      conjugate: whether the conjugates are wanted, as of gradients that `jax.grad` returned.
    """
    found = {}
    for name, x in leaves.items():
        if np.iscomplexobj(x):
            found[f"{name}/complex/real"] = x.real
            found[f"{name}/complex/imaginary"] = -x.imag if conjugate else x.imag
        else:
            found[name] = x
    return found


def worst_leaf(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[str, float]:
    """Return the leaf with the largest error, and this error.

    It is the largest difference over the leaf's largest gradient, or over a thousandth of the
    largest gradient of all leaves, if that is more. A leaf whose gradients are all below 1e-5 of
    the largest of all is measured by the latter: its exact gradient is zero (of a key's bias, of a
    bias before a normalization), and what there is is rounding.
    """
    largest = max((np.abs(x).max(initial=0) for x in expected.values()), default=0.0)
    errors = {}
    for name, want in expected.items():
        difference = np.abs(found[name] - want).max(initial=0)
        own = np.abs(want).max(initial=0)
        scale = largest if own < 1e-5 * largest else max(own, 1e-3 * largest)
        error = 0.0 if difference == 0 else float(difference / max(scale, 1e-30))
        errors[name] = float("inf") if np.isnan(error) else error
    return max(errors.items(), key=lambda item: item[1], default=("", 0.0))
