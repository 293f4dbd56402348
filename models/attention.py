"""Causal attention with grouped key-value heads and a float32 softmax; a cache of keys and values.

Shape letters: B batch, L query positions, M key positions (L, or the places of a cache), K
key-value heads, G query heads for each of them, N = K G, H head width.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from .blockwise import blockwise_attention
from .scores import PLAIN, Dropout, Scores, make_scores, seen_keys

Backend = Literal["auto", "blockwise", "cudnn"]
BLOCK = 512
CUDNN_SCOPE = "cudnn_attention"
"""The scope of operations that are one kernel of cuDNN in a process with an NVIDIA GPU."""

CUDNN_CAPABILITY = 8.0  # compute capability from which cuDNN has attention
CUDNN_HEAD = 128  # the widest head that cuDNN's attention takes on every GPU from Ampere on


def causal_attention(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    *,
    mask_BM: jax.Array | None = None,
    segments_BM: jax.Array | None = None,
    start: jax.Array | int = 0,
    dropout: Dropout | None = None,
    backend: Backend = "auto",
    block: int = BLOCK,
    scale: float | None = None,
    softcap: float | None = None,
    window: jax.Array | int | None = None,
    slopes_KG: jax.Array | None = None,
    sinks_KG: jax.Array | None = None,
) -> jax.Array:
    """Mix values by softmax(scale * q k) over the positions up to each query's own.

    Scores and softmax are float32 for inputs of any dtype. Probabilities are cast to the values'
    dtype before the second product.

    Args:
      q_BLKGH: queries. Query head k * G + g reads key-value head k; G = 1 is ordinary attention.
      k_BMKH, v_BMKH: keys and values. Values may have another width than keys.
      mask_BM: nonzero at real tokens, 0 at padding. None means that all tokens are real. A row that
        sees no token gets uniform weights, not NaN; its result means nothing.
      segments_BM: int[B, M], the number of each token's document in its row. A query sees the keys
        of its own document alone. Without a cache only: M = L. None means one document a row.
      start: int32 scalar, the first query's place among the keys.
      dropout: dropout on the probabilities; None for none.
      backend: "blockwise" computes the scores of `block` queries and as many keys at a time, leaves
        out keys that no query of a block sees, and computes scores again in backward. "cudnn" is
        NVIDIA's kernel, for bfloat16 and float16, without a mask, segments, a cache, dropout, a
        cap, slopes or sinks, and of values as wide as keys. "auto" takes cudnn where the process
        has an NVIDIA GPU and cudnn takes the arguments, and otherwise blockwise.
      block: the number of queries, and of keys, that blockwise takes at a time. Up to so many
        queries see all their keys at once.
      scale: what products are multiplied with; None means 1 / sqrt(H).
      softcap: scores become softcap * tanh(score / softcap); None leaves them.
      window: a query sees its own position and the window - 1 positions before it; None, all before
        it. A traced int32 scalar lets layers of one loop differ; cudnn does not take it.
      slopes_KG: a query's score for a key is lowered by the head's slope times their distance.
      sinks_KG: the score of one more key of each head, whose value is 0.

    Returns:
      Array [B, L, K, G, H] in the values' dtype. Memory of blockwise: B * block * block * K * G
      float32 scores, in backward too; of up to `block` queries B * L * M * K * G.

    Raises:
      ValueError: cudnn does not take the arguments, the backend is unknown, or `block` or a window
        is below 1.
    """
    if backend not in ("auto", "blockwise", "cudnn"):
        raise ValueError(f"backend={backend!r}: take auto, blockwise or cudnn")
    if block < 1:
        raise ValueError(f"block={block}: attention takes 1 query or more at a time")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window={window}: a query sees at least its own position; give 1 or more")
    scores = Scores(scale, softcap, window, segments_BM, slopes_KG, sinks_KG)
    missing = _missing_for_cudnn(q_BLKGH, k_BMKH, v_BMKH, mask_BM, start, dropout, scores)
    if backend == "cudnn" and missing:
        raise ValueError(
            f'backend="cudnn" does not take {missing}; use "auto" or "blockwise", which do'
        )
    if backend == "cudnn" or (backend == "auto" and not missing and _has_nvidia_gpu()):
        batch, length, _, _, head = q_BLKGH.shape
        out = jax.nn.dot_product_attention(
            q_BLKGH.reshape(batch, length, -1, head),
            k_BMKH,
            v_BMKH,
            is_causal=True,
            scale=scale,
            local_window_size=None if window is None else (int(window) - 1, 0),
            implementation="cudnn",
        )
        return out.reshape(q_BLKGH.shape)
    # `zeroxla.plan` reads in the scope's name that a GPU would run one kernel instead.
    scope = CUDNN_SCOPE if backend == "auto" and not missing else "attention"
    operands = (q_BLKGH, k_BMKH, v_BMKH, mask_BM, start, dropout)
    if q_BLKGH.shape[1] > block:
        return blockwise_attention(*operands, block, scope, scores)
    with jax.named_scope(scope):
        return dense_attention(*operands, scores)


def _missing_for_cudnn(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    mask_BM: jax.Array | None,
    start: jax.Array | int,
    dropout: Dropout | None,
    scores: Scores,
) -> str | None:
    """Return which of the arguments cuDNN's attention does not take; None if it takes all."""
    head = q_BLKGH.shape[-1]
    if q_BLKGH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q_BLKGH.dtype}, only bfloat16 and float16"
    if head % 8 or head > CUDNN_HEAD:
        return f"heads of width {head}, only multiples of 8 up to {CUDNN_HEAD}"
    if v_BMKH.shape[-1] != head:
        return f"values of width {v_BMKH.shape[-1]} with keys of width {head}"
    if mask_BM is not None:
        return "a mask of padding"
    if not isinstance(start, int) or start or q_BLKGH.shape[1] != k_BMKH.shape[1]:
        return "a cache of keys and values"
    if scores.segments_BM is not None:
        return "segments"
    if scores.softcap is not None:
        return "a cap of scores"
    if scores.slopes_KG is not None:
        return "slopes of scores"
    if scores.sinks_KG is not None:
        return "sinks of scores"
    if scores.window is not None and not isinstance(scores.window, int):
        return "a window that differs between the turns of a loop"
    return None if dropout is None else "dropout"


@functools.cache
def _has_nvidia_gpu() -> bool:
    """Return whether this process has a GPU that cuDNN's attention runs on."""
    if jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    if "cuda" not in device.client.platform_version.lower():
        return False
    return float(device.compute_capability) >= CUDNN_CAPABILITY


def dense_attention(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    mask_BM: jax.Array | None,
    start: jax.Array | int,
    dropout: Dropout | None,
    scores: Scores = PLAIN,
) -> jax.Array:
    """Attend with all scores at once."""
    products_BKLGM = jnp.einsum(
        "blkgh,bmkh->bklgm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32
    )
    query_L, key_M = jnp.arange(q_BLKGH.shape[1]) + start, jnp.arange(k_BMKH.shape[1])
    scores_BKLGM, _ = make_scores(
        products_BKLGM,
        query_L,
        key_M,
        scale=q_BLKGH.shape[-1] ** -0.5 if scores.scale is None else scores.scale,
        softcap=scores.softcap,
        slopes_KG=scores.slopes_KG,
    )
    segments = scores.segments_BM
    seen = seen_keys(
        query_L,
        key_M,
        window=scores.window,
        mask_BP=mask_BM,
        segments=None if segments is None else (segments, segments),
    )
    scores_BKLGM = jnp.where(seen, scores_BKLGM, jnp.finfo(jnp.float32).min)
    if scores.sinks_KG is not None:
        sinks_KLG1 = scores.sinks_KG.astype(jnp.float32)[:, None, :, None]
        sinks_BKLG1 = jnp.broadcast_to(sinks_KLG1, (*scores_BKLGM.shape[:-1], 1))
        scores_BKLGM = jnp.concatenate([scores_BKLGM, sinks_BKLG1], axis=-1)
    probs_BKLGM = jax.nn.softmax(scores_BKLGM, axis=-1).astype(v_BMKH.dtype)
    probs_BKLGM = probs_BKLGM[..., : v_BMKH.shape[1]]  # all but the sink's
    if dropout is not None:
        kept = jax.random.bernoulli(dropout.key, 1 - dropout.rate, probs_BKLGM.shape)
        probs_BKLGM = jnp.where(kept, probs_BKLGM / (1 - dropout.rate), 0)
    return jnp.einsum("bklgm,bmkh->blkgh", probs_BKLGM, v_BMKH)


def cached(cache_BMKH: jax.Array, new_BLKH: jax.Array, start: jax.Array | int) -> jax.Array:
    """Return the cache with `new_BLKH` at the places from `start` on, cast to the cache's dtype.

    If L places do not fit after `start`, the last L are written (`dynamic_update_slice`).
    """
    new_BLKH = new_BLKH.astype(cache_BMKH.dtype)
    return jax.lax.dynamic_update_slice_in_dim(cache_BMKH, new_BLKH, start, axis=1)
