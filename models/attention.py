"""Causal attention with grouped key-value heads and a float32 softmax; a cache of keys and values.

Shape letters: B batch, L query positions, M key positions (L, or the places of a cache), K
key-value heads, G query heads for each of them, H head width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def causal_attention(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    *,
    mask_BM: jax.Array | None = None,
    start: jax.Array | int = 0,
    drop: Callable[[jax.Array], jax.Array] = lambda probs: probs,
) -> jax.Array:
    """Mix values by softmax(q k / sqrt(H)) over the positions up to each query's own.

    Scores and softmax are float32 for inputs of any dtype. Probabilities are cast to the values'
    dtype before the second product.

    Args:
      q_BLKGH: queries. Query head k * G + g reads key-value head k; G = 1 is ordinary attention.
      k_BMKH, v_BMKH: keys and values.
      mask_BM: nonzero at real tokens, 0 at padding. None means that all tokens are real. A row that
        sees no token gets uniform weights, not NaN; its result means nothing.
      start: int32 scalar, the first query's place among the keys.
      drop: dropout on the probabilities.

    Returns:
      Array [B, L, K, G, H] in the values' dtype. Memory: B * L * M * K * G float32 scores.
    """
    scores_BKLGM = jnp.einsum(
        "blkgh,bmkh->bklgm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32
    )
    scores_BKLGM *= q_BLKGH.shape[-1] ** -0.5
    query_L, key_M = jnp.arange(q_BLKGH.shape[1]) + start, jnp.arange(k_BMKH.shape[1])
    seen = (query_L[:, None] >= key_M[None, :])[None, None, :, None, :]
    if mask_BM is not None:
        seen = seen & (mask_BM != 0)[:, None, None, None, :]
    scores_BKLGM = jnp.where(seen, scores_BKLGM, jnp.finfo(jnp.float32).min)
    probs_BKLGM = drop(jax.nn.softmax(scores_BKLGM, axis=-1).astype(v_BMKH.dtype))
    return jnp.einsum("bklgm,bmkh->blkgh", probs_BKLGM, v_BMKH)


def cached(cache_BMKH: jax.Array, new_BLKH: jax.Array, start: jax.Array | int) -> jax.Array:
    """Return the cache with `new_BLKH` at the places from `start` on, cast to the cache's dtype.

    If L places do not fit after `start`, the last L are written (`dynamic_update_slice`).
    """
    new_BLKH = new_BLKH.astype(cache_BMKH.dtype)
    return jax.lax.dynamic_update_slice_in_dim(cache_BMKH, new_BLKH, start, axis=1)
