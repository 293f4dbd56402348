"""Optimizers that need matrices whole, as users write them: Shampoo and SOAP, in plain jnp.

Leaves of more than two dims are stacks of matrices, and each matrix is treated alone. All other
leaves take a plain gradient step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class MatrixState(NamedTuple):
    """The state of both: a counter, and by leaf a dict of arrays; {} for a leaf that is none."""

    count: jax.Array
    leaves: Any


def shampoo(
    learning_rate: float, *, decay: float = 0.9, every: int = 2, eps: float = 1e-4
) -> optax.GradientTransformation:
    """Return Shampoo: L^-1/4 G R^-1/4, with roots that are computed anew in every few steps.

    Source: Gupta et al., arXiv 1802.09568.
    """

    def init(g: jax.Array) -> dict[str, jax.Array]:
        rows, columns = jnp.eye(g.shape[0]), jnp.eye(g.shape[1])
        sides = {"left": rows, "right": columns}
        return sides | {f"{name}_root": x for name, x in sides.items()}

    def update(
        g: jax.Array, state: dict[str, jax.Array], count: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        left = decay * state["left"] + (1 - decay) * jnp.einsum("ij,kj->ik", g, g)
        right = decay * state["right"] + (1 - decay) * jnp.einsum("ij,ik->jk", g, g)
        roots = jax.lax.cond(
            count % every == 0,
            lambda: (_inverse_root(left, eps), _inverse_root(right, eps)),
            lambda: (state["left_root"], state["right_root"]),
        )
        new = {"left": left, "right": right, "left_root": roots[0], "right_root": roots[1]}
        return -learning_rate * (roots[0] @ g @ roots[1]), new

    return _by_matrix(init, update, learning_rate)


def soap(
    learning_rate: float, *, decay: float = 0.9, every: int = 2, eps: float = 1e-6
) -> optax.GradientTransformation:
    """Return SOAP: Adam in the eigenbasis of Shampoo's sums, which a QR step brings up to date.

    Source: Vyas et al., arXiv 2409.11321.
    """

    def init(g: jax.Array) -> dict[str, jax.Array]:
        rows, columns = jnp.eye(g.shape[0]), jnp.eye(g.shape[1])
        sides = {"left": rows, "right": columns, "left_basis": rows, "right_basis": columns}
        return sides | {"mu": jnp.zeros_like(g), "nu": jnp.zeros_like(g)}

    def update(
        g: jax.Array, state: dict[str, jax.Array], count: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        left = decay * state["left"] + (1 - decay) * g @ g.T
        right = decay * state["right"] + (1 - decay) * g.T @ g
        p, q = state["left_basis"], state["right_basis"]
        mu = decay * state["mu"] + (1 - decay) * g
        nu = decay * state["nu"] + (1 - decay) * jnp.square(p.T @ g @ q)
        turned = (p.T @ mu @ q) / (jnp.sqrt(nu) + eps)
        p_new, q_new = jax.lax.cond(
            count % every == 0,
            lambda: (jnp.linalg.qr(left @ p)[0], jnp.linalg.qr(right @ q)[0]),
            lambda: (p, q),
        )
        new = {"left": left, "right": right, "left_basis": p_new, "right_basis": q_new}
        return -learning_rate * (p @ turned @ q.T), new | {"mu": mu, "nu": nu}

    return _by_matrix(init, update, learning_rate)


def _inverse_root(x: jax.Array, eps: float) -> jax.Array:
    values, vectors = jnp.linalg.eigh(x)
    return (vectors * jnp.maximum(values, eps) ** -0.25) @ vectors.T


def _by_matrix(init: Any, update: Any, learning_rate: float) -> optax.GradientTransformation:
    """Return the transformation that treats each matrix of each leaf alone."""

    def over_stacks(fun: Any, g: jax.Array) -> Any:
        for _ in range(g.ndim - 2):
            fun = jax.vmap(fun)
        return fun

    def init_all(params: Any) -> MatrixState:
        leaves = jax.tree.map(lambda x: over_stacks(init, x)(x) if x.ndim > 1 else {}, params)
        return MatrixState(count=jnp.zeros((), jnp.int32), leaves=leaves)

    def update_all(grads: Any, state: MatrixState, params: Any = None) -> tuple[Any, MatrixState]:
        del params
        leaves, tree = jax.tree.flatten(grads)
        found = []
        for g, own in zip(leaves, tree.flatten_up_to(state.leaves), strict=True):
            one = functools.partial(update, count=state.count)
            found.append(over_stacks(one, g)(g, own) if g.ndim > 1 else (-learning_rate * g, {}))
        updates, new = (tree.unflatten(x) for x in zip(*found, strict=True))
        return updates, MatrixState(count=state.count + 1, leaves=new)

    return optax.GradientTransformation(init_all, update_all)


def damped(*, damping: float = 1.0) -> optax.GradientTransformation:
    """Return G (d I + G^T G)^-1, by a Cholesky factor of each matrix of each leaf. For small
    gradients and d = 1 it is all but G, so that it multiplies no rounding."""

    def one(g: jax.Array) -> jax.Array:
        factor = jnp.linalg.cholesky(damping * jnp.eye(g.shape[1]) + g.T @ g)
        return jax.scipy.linalg.cho_solve((factor, True), g.T).T

    def update(g: jax.Array) -> jax.Array:
        if g.ndim < 2:
            return g
        fun = one
        for _ in range(g.ndim - 2):
            fun = jax.vmap(fun)
        return fun(g)

    return optax.stateless(lambda grads, _: jax.tree.map(update, grads))
