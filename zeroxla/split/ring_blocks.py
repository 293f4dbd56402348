"""Attention of one device's queries to the keys that are with it, a block of each at a time.

A device has two runs of positions, one early and one late (see `ring`). Here a *half* is one of
them. Forward adds keys to what the queries have seen so far; backward computes scores again.

Shape letters: B batch, S positions of a device's two halves, K key-value heads, G query heads for
each of them, H head width; Q and P are the positions of a block of queries and of keys.

Source: Dao et al., FlashAttention, arXiv 2205.14135.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = float(np.finfo(np.float32).min)
LARGEST_BLOCK = 512
"""The most queries, and keys, of a block."""


class Seen(NamedTuple):
    """What queries have seen so far.

    Attributes:
      total_BSKGH: the sum of values, weighted; float32.
      largest_BSKG: the largest score; float32.
      sum_BSKG: the sum of the weights, exp(score - largest); float32.
    """

    total_BSKGH: jax.Array
    largest_BSKG: jax.Array
    sum_BSKG: jax.Array

    @staticmethod
    def nothing(q_BSKGH: jax.Array) -> Seen:
        """Return what queries have seen before the first key."""
        scores = q_BSKGH.shape[:-1]
        return Seen(
            jnp.zeros(q_BSKGH.shape, jnp.float32),
            jnp.full(scores, LOWEST, jnp.float32),
            jnp.zeros(scores, jnp.float32),
        )


class Keys(NamedTuple):
    """Keys that are with a device.

    Attributes:
      k_BSKH, v_BSKH: keys and values.
      mask_BS: nonzero at real tokens; None if all are.
      first: int32[2], the first position of each half.
    """

    k_BSKH: jax.Array
    v_BSKH: jax.Array
    mask_BS: jax.Array | None
    first: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """How a half is cut.

    Attributes:
      half: the positions of a half.
    """

    half: int

    @property
    def size(self) -> int:
        """The positions of a block: the most that divide a half."""
        return next(n for n in range(min(self.half, LARGEST_BLOCK), 0, -1) if self.half % n == 0)

    @property
    def own(self) -> np.ndarray:
        """The pairs of a block of queries and one of keys of the same device, int32[pairs, 2]."""
        num = 2 * self.half // self.size
        return _pairs((i, j) for i in range(num) for j in range(i + 1))

    def visiting(self, *, are_earlier: bool) -> np.ndarray:
        """The pairs with another device's keys. All queries see the early half of a device that is
        earlier; the late queries see both halves of one that is later."""
        num = self.half // self.size
        queries, keys = (2 * num, num) if are_earlier else (num, 2 * num)
        start = 2 * num - queries
        return _pairs((start + i, j) for i in range(queries) for j in range(keys))

    def position(self, first: jax.Array, block: jax.Array) -> jax.Array:
        """Return the first position of a block, given those of the halves."""
        per_half = self.half // self.size
        return first[block // per_half] + block % per_half * self.size

    def of(self, x: jax.Array, block: jax.Array) -> jax.Array:
        """Return a block of an array, [B, S, ...]."""
        return lax.dynamic_slice_in_dim(x, block * self.size, self.size, axis=1)

    def put(self, x: jax.Array, block: jax.Array, new: jax.Array) -> jax.Array:
        """Return an array with another block."""
        return lax.dynamic_update_slice_in_dim(x, new, block * self.size, axis=1)


def _pairs(pairs: Any) -> np.ndarray:
    return np.array(list(pairs), np.int32)


def attend(
    blocks: Blocks,
    seen: Seen,
    q_BSKGH: jax.Array,
    first: jax.Array,
    keys: Keys,
    pairs: jax.Array,
) -> Seen:
    """Add keys to what queries have seen.

    Args:
      blocks: how halves are cut.
      seen: what they have seen before.
      q_BSKGH: the queries.
      first: int32[2], the first position of each half of the queries.
      keys: the keys.
      pairs: int32[pairs, 2], which block of queries sees which block of keys.

    Cost: two products for each pair of blocks.
    """

    def add(seen: Seen, pair: jax.Array) -> tuple[Seen, None]:
        i, j = pair[0], pair[1]
        before_BQKG = blocks.of(seen.largest_BSKG, i)
        scores_BKQGP, _ = _scores(blocks, q_BSKGH, first, keys, i, j)
        after_BQKG = jnp.maximum(before_BQKG, _swapped(scores_BKQGP.max(axis=-1)))
        weights_BKQGP = jnp.exp(scores_BKQGP - _swapped(after_BQKG)[..., None])
        scale_BQKG = jnp.exp(before_BQKG - after_BQKG)
        sum_BQKG = blocks.of(seen.sum_BSKG, i) * scale_BQKG + _swapped(weights_BKQGP.sum(axis=-1))
        v_BPKH = blocks.of(keys.v_BSKH, j)
        mixed_BQKGH = _product("bkqgp,bpkh->bqkgh", weights_BKQGP.astype(v_BPKH.dtype), v_BPKH)
        total_BQKGH = blocks.of(seen.total_BSKGH, i) * scale_BQKG[..., None] + mixed_BQKGH
        new = (total_BQKGH, after_BQKG, sum_BQKG)
        return Seen(*(blocks.put(x, i, y) for x, y in zip(seen, new, strict=True))), None

    return lax.scan(add, seen, pairs)[0]


class Queries(NamedTuple):
    """Queries, with what backward needs of them.

    Attributes:
      q_BSKGH: the queries.
      d_out_BSKGH: the cotangent of the result.
      common_BSKG: the part of a score's derivative that all keys of a query have in common.
      largest_BSKG, sum_BSKG: the largest score and the sum of weights over all keys.
      first: int32[2], the first position of each half.
    """

    q_BSKGH: jax.Array
    d_out_BSKGH: jax.Array
    common_BSKG: jax.Array
    largest_BSKG: jax.Array
    sum_BSKG: jax.Array
    first: jax.Array


def cotangents(
    blocks: Blocks,
    sums: tuple[jax.Array, jax.Array, jax.Array],
    queries: Queries,
    keys: Keys,
    pairs: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `sums`, float32 cotangents of queries, keys and values, with those of further pairs.

    Cost: five products for each pair of blocks.
    """
    scale = queries.q_BSKGH.shape[-1] ** -0.5

    def add(sums: tuple[jax.Array, ...], pair: jax.Array) -> tuple[Any, None]:
        i, j = pair[0], pair[1]
        q_BQKGH, d_out_BQKGH, common_BQKG, largest_BQKG, sum_BQKG = (
            blocks.of(x, i) for x in queries[:5]
        )
        k_BPKH, v_BPKH = blocks.of(keys.k_BSKH, j), blocks.of(keys.v_BSKH, j)
        scores_BKQGP, seen = _scores(blocks, queries.q_BSKGH, queries.first, keys, i, j)
        weights_BKQGP = jnp.exp(scores_BKQGP - _swapped(largest_BQKG)[..., None])
        probs_BKQGP = weights_BKQGP / _swapped(sum_BQKG)[..., None]
        dv_BPKH = _product("bkqgp,bqkgh->bpkh", probs_BKQGP.astype(v_BPKH.dtype), d_out_BQKGH)
        d_probs_BKQGP = _product("bqkgh,bpkh->bkqgp", d_out_BQKGH, v_BPKH)
        d_scores_BKQGP = probs_BKQGP * (d_probs_BKQGP - _swapped(common_BQKG)[..., None]) * scale
        # A query that sees no key weighs all alike, and none of them by its score.
        d_scores_BKQGP = jnp.where(seen, d_scores_BKQGP, 0).astype(q_BQKGH.dtype)
        dq_BQKGH = _product("bkqgp,bpkh->bqkgh", d_scores_BKQGP, k_BPKH)
        dk_BPKH = _product("bkqgp,bqkgh->bpkh", d_scores_BKQGP, q_BQKGH)
        found = ((i, dq_BQKGH), (j, dk_BPKH), (j, dv_BPKH))
        pairs = zip(sums, found, strict=True)
        return tuple(blocks.put(x, at, blocks.of(x, at) + y) for x, (at, y) in pairs), None

    dq, dk, dv = lax.scan(add, sums, pairs)[0]
    return dq, dk, dv


def _scores(
    blocks: Blocks, q_BSKGH: jax.Array, first: jax.Array, keys: Keys, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (scores, whether a query sees a key); a key that is not seen has the lowest score.

    Both are [B, K, Q, G, P], float32 and bool; the second one has dims of 1.
    """
    q_BQKGH, k_BPKH = blocks.of(q_BSKGH, i), blocks.of(keys.k_BSKH, j)
    scores_BKQGP = _product("bqkgh,bpkh->bkqgp", q_BQKGH, k_BPKH) * q_BQKGH.shape[-1] ** -0.5
    places = jnp.arange(blocks.size)
    query_Q, key_P = places + blocks.position(first, i), places + blocks.position(keys.first, j)
    seen = (query_Q[:, None] >= key_P)[None, None, :, None, :]
    if keys.mask_BS is not None:
        seen = seen & (blocks.of(keys.mask_BS, j) != 0)[:, None, None, None, :]
    return jnp.where(seen, scores_BKQGP, LOWEST), seen


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _swapped(x: jax.Array) -> jax.Array:
    """[B, S, K, G] -> [B, K, S, G], or back."""
    return jnp.swapaxes(x, 1, 2)
