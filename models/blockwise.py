"""Attention that holds the scores of one block of queries and one block of keys at a time.

Forward keeps, for each query, the largest score so far, the sum of exponentials, and the sum of
values weighted by them; backward computes the scores again. A loop goes over pairs of blocks, those
above the diagonal left out, so nothing has the size of all scores.

Shape letters: B batch, L query positions, M key positions, K key-value heads, G query heads for
each of them, H head width; Q and P are the positions of a block of queries and of keys.

Source: Dao et al., FlashAttention, arXiv 2205.14135; Milakov and Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .blockwise_pairs import LOWEST, Operands, Pair, Setting, make_pairs, product
from .scores import PLAIN, Dropout, Scores


def blockwise_attention(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    mask_BM: jax.Array | None,
    start: jax.Array | int,
    dropout: Dropout | None,
    block: int,
    scope: str = "attention",
    scores: Scores = PLAIN,
) -> jax.Array:
    """Mix values by a causal softmax; see `attention.causal_attention`.

    `scope` is the name of the operations' scope, forward and backward.

    It has a first derivative in reverse mode, and no other.

    Cost: each pair of blocks takes two products forward and five backward.
    """
    length, num_keys = q_BLKGH.shape[1], k_BMKH.shape[1]
    known = scores.window if isinstance(scores.window, int) else None
    setting = Setting(
        block=block,
        num_keys=num_keys,
        triangular=isinstance(start, int) and start == 0 and length == num_keys,
        rate=0.0 if dropout is None else dropout.rate,
        scope=scope,
        scale=q_BLKGH.shape[-1] ** -0.5 if scores.scale is None else scores.scale,
        softcap=scores.softcap,
        window=known,
    )
    segments = scores.segments_BM
    operands = Operands(
        _padded(q_BLKGH, block),
        _padded(k_BMKH, block),
        _padded(v_BMKH, block),
        None if mask_BM is None else _padded(mask_BM, block),
        jnp.asarray(start, jnp.int32),
        None if dropout is None else dropout.key,
        None if segments is None else _padded(segments, block),
        scores.slopes_KG,
        None if scores.window is None or known else jnp.asarray(scores.window, jnp.int32),
        scores.sinks_KG,
    )
    attend = blockwise_causal_attention if scores.is_plain else blockwise_shaped_attention
    return attend(setting, operands)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_causal_attention(setting: Setting, operands: Operands) -> jax.Array:
    return _forward(setting, operands)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_shaped_attention(setting: Setting, operands: Operands) -> jax.Array:
    """The same, of scores that are not plain, under another name: whatever knows the other function
    by its name takes its scores to be plain."""
    return _forward(setting, operands)[0]


def _forward(setting: Setting, operands: Operands) -> tuple[jax.Array, Any]:
    q_BLKGH, v_BMKH = operands.q_BLKGH, operands.v_BMKH
    total_BLKGH = jnp.zeros((*q_BLKGH.shape[:-1], v_BMKH.shape[-1]), jnp.float32)
    largest_BLKG = jnp.full(q_BLKGH.shape[:-1], LOWEST, jnp.float32)
    sum_BLKG = jnp.zeros(q_BLKGH.shape[:-1], jnp.float32)
    if operands.sinks_KG is not None:  # as if a key with the value 0 came first
        sinks_KG = operands.sinks_KG.astype(jnp.float32)
        largest_BLKG, sum_BLKG = jnp.broadcast_to(sinks_KG, sum_BLKG.shape), sum_BLKG + 1

    def add(at: Pair, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before_BQKG, sum_BQKG = at.queries(carry[1]), at.queries(carry[2])
        scores_BKQGP, _, _ = at.scores(operands)
        after_BQKG = jnp.maximum(before_BQKG, _swapped(scores_BKQGP.max(axis=-1)))
        weights_BKQGP = jnp.exp(scores_BKQGP - _swapped(after_BQKG)[..., None])
        scale_BQKG = jnp.exp(before_BQKG - after_BQKG)
        sum_BQKG = sum_BQKG * scale_BQKG + _swapped(weights_BKQGP.sum(axis=-1))
        kept_BKQGP = at.dropped(weights_BKQGP, operands.key).astype(v_BMKH.dtype)
        mixed_BQKGH = product("bkqgp,bpkh->bqkgh", kept_BKQGP, at.keys(v_BMKH))
        total_BQKGH = at.queries(carry[0]) * scale_BQKG[..., None] + mixed_BQKGH
        new = (total_BQKGH, after_BQKG, sum_BQKG)
        return tuple(at.with_queries(x, part) for x, part in zip(carry, new, strict=True))

    carry = (total_BLKGH, largest_BLKG, sum_BLKG)
    with jax.named_scope(setting.scope):
        total_BLKGH, largest_BLKG, sum_BLKG = _over_pairs(add, carry, setting, operands)
    out_BLKGH = (total_BLKGH / sum_BLKG[..., None]).astype(v_BMKH.dtype)
    kept = (out_BLKGH, largest_BLKG, sum_BLKG)
    out_BLKGH, largest_BLKG, sum_BLKG = (checkpoint_name(x, "attention") for x in kept)
    return out_BLKGH, (operands, out_BLKGH, largest_BLKG, sum_BLKG)


def _backward(setting: Setting, kept: Any, d_out_BLKGH: jax.Array) -> tuple[Operands]:
    operands, out_BLKGH, largest_BLKG, sum_BLKG = kept
    q_BLKGH, k_BMKH, v_BMKH = operands.q_BLKGH, operands.k_BMKH, operands.v_BMKH
    # The part of a score's derivative that all keys of a query have in common.
    common_BLKG = jnp.sum(d_out_BLKGH.astype(jnp.float32) * out_BLKGH, axis=-1)

    def add(at: Pair, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        dq_BLKGH, dk_BMKH, dv_BMKH = carry
        q_BQKGH, d_out_BQKGH = at.queries(q_BLKGH), at.queries(d_out_BLKGH)
        k_BPKH, v_BPKH = at.keys(k_BMKH), at.keys(v_BMKH)
        largest_BKQG, sum_BKQG = (_swapped(at.queries(x)) for x in (largest_BLKG, sum_BLKG))
        scores_BKQGP, derivative, seen = at.scores(operands)
        weights_BKQGP = jnp.exp(scores_BKQGP - largest_BKQG[..., None])
        probs_BKQGP = weights_BKQGP / sum_BKQG[..., None]
        kept_BKQGP = at.dropped(probs_BKQGP, operands.key)
        dv_BPKH = product("bkqgp,bqkgh->bpkh", kept_BKQGP.astype(v_BPKH.dtype), d_out_BQKGH)
        d_probs_BKQGP = at.dropped(product("bqkgh,bpkh->bkqgp", d_out_BQKGH, v_BPKH), operands.key)
        common_BKQG = _swapped(at.queries(common_BLKG))
        d_scores_BKQGP = probs_BKQGP * (d_probs_BKQGP - common_BKQG[..., None]) * setting.scale
        if derivative is not None:
            d_scores_BKQGP *= derivative
        # A query that sees no key weighs all alike, and none of them by its score.
        d_scores_BKQGP = jnp.where(seen, d_scores_BKQGP, 0).astype(q_BQKGH.dtype)
        dq_BQKGH = product("bkqgp,bpkh->bqkgh", d_scores_BKQGP, k_BPKH)
        dk_BPKH = product("bkqgp,bqkgh->bpkh", d_scores_BKQGP, q_BQKGH)
        return (
            at.with_queries(dq_BLKGH, at.queries(dq_BLKGH) + dq_BQKGH),
            at.with_keys(dk_BMKH, at.keys(dk_BMKH) + dk_BPKH),
            at.with_keys(dv_BMKH, at.keys(dv_BMKH) + dv_BPKH),
        )

    inputs = (q_BLKGH, k_BMKH, v_BMKH)
    carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
    with jax.named_scope(setting.scope):
        found = _over_pairs(add, carry, setting, operands)
    dq, dk, dv = (x.astype(of.dtype) for x, of in zip(found, inputs, strict=True))
    sinks_KG, d_sinks_KG = operands.sinks_KG, None
    if sinks_KG is not None:
        probs_BLKG = jnp.exp(sinks_KG.astype(jnp.float32) - largest_BLKG) / sum_BLKG
        d_sinks_KG = -(probs_BLKG * common_BLKG).sum(axis=(0, 1)).astype(sinks_KG.dtype)
    return (Operands(dq, dk, dv, sinks_KG=d_sinks_KG),)


blockwise_causal_attention.defvjp(_forward, _backward)
blockwise_shaped_attention.defvjp(_forward, _backward)


def _over_pairs(
    add: Callable[[Pair, Any], Any], carry: Any, setting: Setting, operands: Operands
) -> Any:
    """Add what each pair of blocks gives; those that a window leaves out give nothing."""

    def turn(carry: Any, pair: jax.Array) -> tuple[Any, None]:
        at = Pair(setting, pair)
        seen = at.is_seen(operands)
        add_pair = functools.partial(add, at)
        return add_pair(carry) if seen is None else lax.cond(
            seen, add_pair, lambda carry: carry, carry
        ), None

    return lax.scan(turn, carry, make_pairs(setting, operands))[0]


def _swapped(x: jax.Array) -> jax.Array:
    """[B, Q, K, G] -> [B, K, Q, G], or back."""
    return jnp.swapaxes(x, 1, 2)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Fill dim 1 up to a multiple of the block with zeros."""
    more = -x.shape[1] % block
    if not more:
        return x
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
