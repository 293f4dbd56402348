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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

LOWEST = float(np.finfo(np.float32).min)


class Dropout(NamedTuple):
    """Dropout of probabilities: the rate, and a random key of its own."""

    rate: float
    key: jax.Array


class _Setting(NamedTuple):
    """Settings of one call, which are constants of its program.

    Attributes:
      block: number of queries, and of keys, in a block.
      num_keys: number of keys without padding.
      triangular: whether query i sees no key above i.
      rate: of dropout; 0 for none.
      scope: the name of the operations' scope.
    """

    block: int
    num_keys: int
    triangular: bool
    rate: float
    scope: str


class _Operands(NamedTuple):
    """Arrays whose positions are whole blocks; mask and key may be None."""

    q_BLKGH: jax.Array
    k_BMKH: jax.Array
    v_BMKH: jax.Array
    mask_BM: jax.Array | None
    start: jax.Array
    key: jax.Array | None


def blockwise_attention(
    q_BLKGH: jax.Array,
    k_BMKH: jax.Array,
    v_BMKH: jax.Array,
    mask_BM: jax.Array | None,
    start: jax.Array | int,
    dropout: Dropout | None,
    block: int,
    scope: str = "attention",
) -> jax.Array:
    """Mix values by a causal softmax; see `attention.causal_attention`.

    `scope` is the name of the operations' scope, forward and backward.

    It has a first derivative in reverse mode, and no other.

    Cost: each pair of blocks takes two products forward and five backward.
    """
    length, num_keys = q_BLKGH.shape[1], k_BMKH.shape[1]
    setting = _Setting(
        block=block,
        num_keys=num_keys,
        triangular=isinstance(start, int) and start == 0 and length == num_keys,
        rate=0.0 if dropout is None else dropout.rate,
        scope=scope,
    )
    operands = _Operands(
        _padded(q_BLKGH, block),
        _padded(k_BMKH, block),
        _padded(v_BMKH, block),
        None if mask_BM is None else _padded(mask_BM, block),
        jnp.asarray(start, jnp.int32),
        None if dropout is None else dropout.key,
    )
    return blockwise_causal_attention(setting, operands)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise_causal_attention(setting: _Setting, operands: _Operands) -> jax.Array:
    return _forward(setting, operands)[0]


def _forward(setting: _Setting, operands: _Operands) -> tuple[jax.Array, Any]:
    q_BLKGH, v_BMKH = operands.q_BLKGH, operands.v_BMKH
    total_BLKGH = jnp.zeros((*q_BLKGH.shape[:-1], v_BMKH.shape[-1]), jnp.float32)
    largest_BLKG = jnp.full(q_BLKGH.shape[:-1], LOWEST, jnp.float32)
    sum_BLKG = jnp.zeros(q_BLKGH.shape[:-1], jnp.float32)

    def add(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[Any, None]:
        at = _Pair(setting, pair)
        before_BQKG, sum_BQKG = at.queries(carry[1]), at.queries(carry[2])
        scores_BKQGP, _ = at.scores(operands)
        after_BQKG = jnp.maximum(before_BQKG, _swapped(scores_BKQGP.max(axis=-1)))
        weights_BKQGP = jnp.exp(scores_BKQGP - _swapped(after_BQKG)[..., None])
        scale_BQKG = jnp.exp(before_BQKG - after_BQKG)
        sum_BQKG = sum_BQKG * scale_BQKG + _swapped(weights_BKQGP.sum(axis=-1))
        kept_BKQGP = at.dropped(weights_BKQGP, operands.key).astype(v_BMKH.dtype)
        mixed_BQKGH = _product("bkqgp,bpkh->bqkgh", kept_BKQGP, at.keys(v_BMKH))
        total_BQKGH = at.queries(carry[0]) * scale_BQKG[..., None] + mixed_BQKGH
        new = (total_BQKGH, after_BQKG, sum_BQKG)
        return tuple(at.with_queries(x, part) for x, part in zip(carry, new, strict=True)), None

    carry = (total_BLKGH, largest_BLKG, sum_BLKG)
    with jax.named_scope(setting.scope):
        (total_BLKGH, largest_BLKG, sum_BLKG), _ = lax.scan(add, carry, _pairs(setting, operands))
    out_BLKGH = (total_BLKGH / sum_BLKG[..., None]).astype(v_BMKH.dtype)
    kept = (out_BLKGH, largest_BLKG, sum_BLKG)
    out_BLKGH, largest_BLKG, sum_BLKG = (checkpoint_name(x, "attention") for x in kept)
    return out_BLKGH, (operands, out_BLKGH, largest_BLKG, sum_BLKG)


def _backward(setting: _Setting, kept: Any, d_out_BLKGH: jax.Array) -> tuple[_Operands]:
    operands, out_BLKGH, largest_BLKG, sum_BLKG = kept
    q_BLKGH, k_BMKH, v_BMKH = operands.q_BLKGH, operands.k_BMKH, operands.v_BMKH
    # The part of a score's derivative that all keys of a query have in common.
    common_BLKG = jnp.sum(d_out_BLKGH.astype(jnp.float32) * out_BLKGH, axis=-1)
    scale = q_BLKGH.shape[-1] ** -0.5

    def add(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[Any, None]:
        at = _Pair(setting, pair)
        dq_BLKGH, dk_BMKH, dv_BMKH = carry
        q_BQKGH, d_out_BQKGH = at.queries(q_BLKGH), at.queries(d_out_BLKGH)
        k_BPKH, v_BPKH = at.keys(k_BMKH), at.keys(v_BMKH)
        largest_BKQG, sum_BKQG = (_swapped(at.queries(x)) for x in (largest_BLKG, sum_BLKG))
        scores_BKQGP, seen = at.scores(operands)
        weights_BKQGP = jnp.exp(scores_BKQGP - largest_BKQG[..., None])
        probs_BKQGP = weights_BKQGP / sum_BKQG[..., None]
        kept_BKQGP = at.dropped(probs_BKQGP, operands.key)
        dv_BPKH = _product("bkqgp,bqkgh->bpkh", kept_BKQGP.astype(v_BPKH.dtype), d_out_BQKGH)
        d_probs_BKQGP = at.dropped(_product("bqkgh,bpkh->bkqgp", d_out_BQKGH, v_BPKH), operands.key)
        common_BKQG = _swapped(at.queries(common_BLKG))
        d_scores_BKQGP = probs_BKQGP * (d_probs_BKQGP - common_BKQG[..., None]) * scale
        # A query that sees no key weighs all alike, and none of them by its score.
        d_scores_BKQGP = jnp.where(seen, d_scores_BKQGP, 0).astype(q_BQKGH.dtype)
        dq_BQKGH = _product("bkqgp,bpkh->bqkgh", d_scores_BKQGP, k_BPKH)
        dk_BPKH = _product("bkqgp,bqkgh->bpkh", d_scores_BKQGP, q_BQKGH)
        new = (
            at.with_queries(dq_BLKGH, at.queries(dq_BLKGH) + dq_BQKGH),
            at.with_keys(dk_BMKH, at.keys(dk_BMKH) + dk_BPKH),
            at.with_keys(dv_BMKH, at.keys(dv_BMKH) + dv_BPKH),
        )
        return new, None

    inputs = (q_BLKGH, k_BMKH, v_BMKH)
    carry = tuple(jnp.zeros(x.shape, jnp.float32) for x in inputs)
    with jax.named_scope(setting.scope):
        found, _ = lax.scan(add, carry, _pairs(setting, operands))
    dq, dk, dv = (x.astype(of.dtype) for x, of in zip(found, inputs, strict=True))
    return (_Operands(dq, dk, dv, None, None, None),)  # pyright: ignore[reportArgumentType]


blockwise_causal_attention.defvjp(_forward, _backward)


class _Pair:
    """A block of queries and a block of keys.

    Attributes:
      first_query, first_key: their first positions, int32 scalars.
    """

    def __init__(self, setting: _Setting, pair: jax.Array) -> None:
        self.setting = setting
        self.first_query, self.first_key = pair[0] * setting.block, pair[1] * setting.block

    def queries(self, x: jax.Array) -> jax.Array:
        """Return the block's part of an array by queries, [B, L, ...]."""
        return lax.dynamic_slice_in_dim(x, self.first_query, self.setting.block, axis=1)

    def keys(self, x: jax.Array) -> jax.Array:
        """Return the block's part of an array by keys, [B, M, ...]."""
        return lax.dynamic_slice_in_dim(x, self.first_key, self.setting.block, axis=1)

    def with_queries(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Return x with another part for the block's queries."""
        return lax.dynamic_update_slice_in_dim(x, part, self.first_query, axis=1)

    def with_keys(self, x: jax.Array, part: jax.Array) -> jax.Array:
        """Return x with another part for the block's keys."""
        return lax.dynamic_update_slice_in_dim(x, part, self.first_key, axis=1)

    def scores(self, operands: _Operands) -> tuple[jax.Array, jax.Array]:
        """Return (scores, whether a query sees a key); a key that is not seen has the lowest score.

        Both are [B, K, Q, G, P], float32 and bool; the second one has dims of 1.
        """
        q_BQKGH = self.queries(operands.q_BLKGH)
        scores_BKQGP = _product("bqkgh,bpkh->bkqgp", q_BQKGH, self.keys(operands.k_BMKH))
        scores_BKQGP *= q_BQKGH.shape[-1] ** -0.5
        places = jnp.arange(self.setting.block)
        query_Q, key_P = places + (self.first_query + operands.start), places + self.first_key
        seen = (query_Q[:, None] >= key_P) & (key_P < self.setting.num_keys)
        seen = seen[None, None, :, None, :]
        if operands.mask_BM is not None:
            seen = seen & (self.keys(operands.mask_BM) != 0)[:, None, None, None, :]
        return jnp.where(seen, scores_BKQGP, LOWEST), seen

    def dropped(self, x_BKQGP: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return x with zeros for what is dropped, and the rest enlarged; the same each time."""
        if key is None:
            return x_BKQGP
        keep = 1 - self.setting.rate
        key = jax.random.fold_in(jax.random.fold_in(key, self.first_query), self.first_key)
        return jnp.where(jax.random.bernoulli(key, keep, x_BKQGP.shape), x_BKQGP / keep, 0)


def _pairs(setting: _Setting, operands: _Operands) -> jax.Array:
    """Return the pairs of a block of queries and a block of keys that it sees, int32[pairs, 2].

    They come as if they followed from the values. JAX would otherwise compute the masks of all
    pairs at once, and keep them, where it differentiates a loop or a `jax.checkpoint` body around.
    """
    num_queries, num_keys = (x.shape[1] // setting.block for x in operands[:2])
    pairs = [
        (i, j)
        for i in range(num_queries)
        for j in range(num_keys)
        if j <= i or not setting.triangular
    ]
    return lax.optimization_barrier((jnp.asarray(pairs, jnp.int32), operands.v_BMKH))[0]


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _swapped(x: jax.Array) -> jax.Array:
    """[B, Q, K, G] -> [B, K, Q, G], or back."""
    return jnp.swapaxes(x, 1, 2)


def _padded(x: jax.Array, block: int) -> jax.Array:
    """Fill dim 1 up to a multiple of the block with zeros."""
    more = -x.shape[1] % block
    if not more:
        return x
    return jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
