"""A small language model in plain JAX, with attention that stays inside segments: a reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 16


def reference_params(length: int, vocab: int = 256) -> dict[str, jax.Array]:
    """Return weights of one block of attention with learned positions."""
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {
        "tokens": (vocab, WIDTH),
        "positions": (length, WIDTH),
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "head": (WIDTH, vocab),
    }
    return {
        name: jax.random.normal(key, shape) / 3
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def reference_loss(params: dict[str, jax.Array], batch: dict[str, np.ndarray]) -> jax.Array:
    """Return the mean loss of the targets that count. Without "segments" a row is one."""
    inputs_BL = jnp.asarray(batch["tokens"][:, :-1])
    length = inputs_BL.shape[1]
    segments_BL = jnp.asarray(batch.get("segments", jnp.ones_like(inputs_BL)))
    default = jnp.broadcast_to(jnp.arange(length), inputs_BL.shape)
    positions_BL = jnp.asarray(batch.get("positions", default))
    x_BLD = params["tokens"][inputs_BL] + params["positions"][positions_BL]
    query, key, value = (x_BLD @ params[name] for name in ("query", "key", "value"))
    scores_BLM = jnp.einsum("bld,bmd->blm", query, key) / WIDTH**0.5
    same_BLM = segments_BL[:, :, None] == segments_BL[:, None, :]
    seen_BLM = same_BLM & jnp.tril(jnp.ones((length, length), bool))
    weights_BLM = jax.nn.softmax(jnp.where(seen_BLM, scores_BLM, -1e30))
    out_BLD = x_BLD + jnp.einsum("blm,bmd->bld", weights_BLM, value)
    logp_BLV = jax.nn.log_softmax(out_BLD @ params["head"])
    targets_BL = jnp.asarray(batch["tokens"][:, 1:])
    losses_BL = -jnp.take_along_axis(logp_BLV, targets_BL[..., None], axis=-1)[..., 0]
    mask_BL = jnp.asarray(batch["mask"] != 0)
    return (losses_BL * mask_BL).sum() / mask_BL.sum()
