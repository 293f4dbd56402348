"""Causal attention with grouped key-value heads, softmax in float32.

Shape letters: B batch, L query positions, M key positions (= L), K key-value heads, G query heads
for each of them, H head width.
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
    drop: Callable[[jax.Array], jax.Array] = lambda probs: probs,
) -> jax.Array:
    """Mix values by softmax(q k / sqrt(H)) over the positions up to each query's own.

    Scores and softmax are float32 whatever the inputs; probabilities are cast to the values'
    dtype before the second product.

    Args:
      q_BLKGH: queries; query head k * G + g reads key-value head k. G = 1 is ordinary attention.
      k_BMKH, v_BMKH: keys and values.
      mask_BM: nonzero at real tokens, 0 at padding; None when there is none. A row that may see
        nothing gets uniform weights, not NaN; its result means nothing.
      drop: dropout on the probabilities.

    Returns:
      Array [B, L, K, G, H] in the values' dtype. Memory: B * L * L * K * G float32 scores.
    """
    scores_BKLGM = jnp.einsum(
        "blkgh,bmkh->bklgm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32
    )
    scores_BKLGM *= q_BLKGH.shape[-1] ** -0.5
    position_L = jnp.arange(q_BLKGH.shape[1])
    seen = (position_L[:, None] >= position_L[None, :])[None, None, :, None, :]
    if mask_BM is not None:
        seen = seen & (mask_BM != 0)[:, None, None, None, :]
    scores_BKLGM = jnp.where(seen, scores_BKLGM, jnp.finfo(jnp.float32).min)
    probs_BKLGM = drop(jax.nn.softmax(scores_BKLGM, axis=-1).astype(v_BMKH.dtype))
    return jnp.einsum("bklgm,bmkh->blkgh", probs_BKLGM, v_BMKH)
