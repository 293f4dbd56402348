"""A block of queries and a block of keys, whose scores exist at a time; see `blockwise.py`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .scores import make_scores, seen_keys

LOWEST = float(np.finfo(np.float32).min)


class Setting(NamedTuple):
    """Settings of one call, which are constants of its program.

    Attributes:
      block: number of queries, and of keys, in a block.
      num_keys: number of keys without padding.
      triangular: whether query i sees no key above i.
      rate: of dropout; 0 for none.
      scope: the name of the operations' scope.
      scale, softcap: as in `Scores`.
      window: the window if it is known here, which leaves out blocks; None otherwise.
    """

    block: int
    num_keys: int
    triangular: bool
    rate: float
    scope: str
    scale: float
    softcap: float | None
    window: int | None

    def is_near(self, i: int, j: int) -> bool:
        """Return whether some query of block i sees some key of block j, if nothing is cached."""
        nearest = (i - j - 1) * self.block + 1  # the smallest distance between two of their places
        return j <= i and (self.window is None or nearest < self.window)


class Operands(NamedTuple):
    """Arrays whose positions are whole blocks; those after the values may be None. `window` is one
    that the setting does not know."""

    q_BLKGH: jax.Array
    k_BMKH: jax.Array
    v_BMKH: jax.Array
    mask_BM: jax.Array | None = None
    start: jax.Array | int = 0
    key: jax.Array | None = None
    segments_BM: jax.Array | None = None
    slopes_KG: jax.Array | None = None
    window: jax.Array | None = None
    sinks_KG: jax.Array | None = None


class Pair:
    """A block of queries and a block of keys.

    Attributes:
      first_query, first_key: their first positions, int32 scalars.
    """

    def __init__(self, setting: Setting, pair: jax.Array) -> None:
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

    def scores(self, operands: Operands) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """Return (scores, their derivative by the scaled products, whether a query sees a key). A
        key that is not seen has the lowest score.

        All are [B, K, Q, G, P], float32 and bool. The last one has dims of 1, and a derivative of
        None means 1.
        """
        setting = self.setting
        places = jnp.arange(setting.block)
        query_Q, key_P = places + (self.first_query + operands.start), places + self.first_key
        scores_BKQGP, derivative = make_scores(
            product(
                "bqkgh,bpkh->bkqgp", self.queries(operands.q_BLKGH), self.keys(operands.k_BMKH)
            ),
            query_Q,
            key_P,
            scale=setting.scale,
            softcap=setting.softcap,
            slopes_KG=operands.slopes_KG,
        )
        mask, segments = operands.mask_BM, operands.segments_BM
        seen = seen_keys(
            query_Q,
            key_P,
            window=setting.window if operands.window is None else operands.window,
            mask_BP=None if mask is None else self.keys(mask),
            segments=None if segments is None else (self.queries(segments), self.keys(segments)),
        )
        seen = seen & (key_P < setting.num_keys)
        return jnp.where(seen, scores_BKQGP, LOWEST), derivative, seen

    def is_seen(self, operands: Operands) -> jax.Array | None:
        """Return whether a window that differs between layers reaches from the block of queries
        back to the block of keys, a bool scalar; None without such a window."""
        if operands.window is None:
            return None
        last_key = self.first_key + self.setting.block - 1
        return self.first_query + operands.start - last_key < operands.window

    def dropped(self, x_BKQGP: jax.Array, key: jax.Array | None) -> jax.Array:
        """Return x with zeros for what is dropped, and the rest enlarged; the same each time."""
        if key is None:
            return x_BKQGP
        keep = 1 - self.setting.rate
        key = jax.random.fold_in(jax.random.fold_in(key, self.first_query), self.first_key)
        return jnp.where(jax.random.bernoulli(key, keep, x_BKQGP.shape), x_BKQGP / keep, 0)


def make_pairs(setting: Setting, operands: Operands) -> jax.Array:
    """Return the pairs of a block of queries and a block of keys that it sees, int32[pairs, 2].

    They come as if they followed from the values. JAX would otherwise compute the masks of all
    pairs at once, and keep them, where it differentiates a loop or a `jax.checkpoint` body around.
    """
    num_queries, num_keys = (x.shape[1] // setting.block for x in operands[:2])
    pairs = [
        (i, j)
        for i in range(num_queries)
        for j in range(num_keys)
        if not setting.triangular or setting.is_near(i, j)
    ]
    return lax.optimization_barrier((jnp.asarray(pairs, jnp.int32), operands.v_BMKH))[0]


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
