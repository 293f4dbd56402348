"""Parts of DeepSpeed's optimizers for which optax has another formula or another rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroxla.program.paths import leaf_path


def scale_by_moments(
    *, b1: Any, b2: Any, eps: float, root: float = 0.0
) -> optax.GradientTransformation:
    """Return Adam's m / (sqrt(v + root) + eps), without the correction of the moments' bias."""

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=zeros, nu=zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + root) + eps), mu, nu)
        return scaled, optax.ScaleByAdamState(count=state.count + 1, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def scale_by_bounded_trust_ratio(least: float, most: float) -> optax.GradientTransformation:
    """Return LAMB's last factor: |leaf| / |update| within bounds, or 1 where either norm is 0."""

    def scale(u: Any, p: Any) -> Any:
        of_p, of_u = jnp.sqrt(jnp.sum(p * p)), jnp.sqrt(jnp.sum(u * u))
        ratio = jnp.clip(of_p / jnp.where(of_u == 0, 1, of_u), least, most)
        return u * jnp.where((of_p == 0) | (of_u == 0), 1.0, ratio)

    return optax.stateless(lambda updates, params: jax.tree.map(scale, updates, params))


def scale_by_root_of_sum(eps: float, initial: float) -> optax.GradientTransformation:
    """Return Adagrad's g / (sqrt(sum) + eps); optax adds eps inside the root."""

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, initial), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        sums = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, updates)
        scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, sums)
        return scaled, optax.ScaleByRssState(sums)

    return optax.GradientTransformation(init, update)


def muon_labels(params: Any) -> Any:
    """Label each leaf "muon" or "adam". As DeepSpeed does, give Muon the matrices, except for those
    whose name says embedding or head."""

    def label(path: Any, x: Any) -> str:
        name = leaf_path(path).lower()
        hidden = x.ndim == 2 and "embed" not in name and "lm_head" not in name
        return "muon" if hidden else "adam"

    return jax.tree_util.tree_map_with_path(label, params)
