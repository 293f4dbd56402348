"""What attention's scores may have besides products of queries and keys, and which keys are seen.

Shape letters: B batch, Q queries and P keys that are looked at together, M all keys, K key-value
heads, G query heads for each of them.

Sources: windows, Child et al., arXiv 1904.10509, and Jiang et al., arXiv 2310.06825; slopes, Press
et al. (ALiBi), arXiv 2108.12409; caps, Gemma 2, arXiv 2408.00118; sinks, Xiao et al., arXiv
2309.17453, learned as in gpt-oss, arXiv 2508.10925.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Dropout(NamedTuple):
    """Dropout of probabilities: the rate, and a random key of its own."""

    rate: float
    key: jax.Array


class Scores(NamedTuple):
    """How scores come from products; see `attention.causal_attention`.

    Attributes:
      scale: what products are multiplied with; None means 1 / sqrt(head width).
      softcap: the largest size of a score; None for no limit.
      window: the number of positions that a query sees, its own included; None for all before it.
        An int32 scalar array may differ between the turns of a loop.
      segments_BM: the number of each position's document; None for one document.
      slopes_KG: what a score loses with each position of distance; None for nothing.
      sinks_KG: for each head, the score of one more key, which every query sees and whose value is
        0; None for none.
    """

    scale: float | None = None
    softcap: float | None = None
    window: jax.Array | int | None = None
    segments_BM: jax.Array | None = None
    slopes_KG: jax.Array | None = None
    sinks_KG: jax.Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are products, divided by the root of the head width, and all are seen."""
        return all(x is None for x in self)


PLAIN = Scores()


def make_scores(
    products_BKQGP: jax.Array,
    query_Q: jax.Array,
    key_P: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    slopes_KG: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the scores, and their derivative by the scaled products; None for 1.

    Args:
      products_BKQGP: float32 products of queries and keys.
      query_Q, key_P: positions, int32.
      scale, softcap, slopes_KG: as in `Scores`.
    """
    scores_BKQGP = products_BKQGP * scale
    derivative = None
    if softcap is not None:
        shares_BKQGP = jnp.tanh(scores_BKQGP / softcap)
        scores_BKQGP, derivative = softcap * shares_BKQGP, 1 - shares_BKQGP**2
    if slopes_KG is not None:
        distance_QP = (query_Q[:, None] - key_P).astype(jnp.float32)
        slopes_KQGP = slopes_KG.astype(jnp.float32)[:, None, :, None] * distance_QP[:, None, :]
        scores_BKQGP = scores_BKQGP - slopes_KQGP
    return scores_BKQGP, derivative


def seen_keys(
    query_Q: jax.Array,
    key_P: jax.Array,
    *,
    window: jax.Array | int | None,
    mask_BP: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Return whether queries see keys, bool[B, 1, Q, 1, P], with dims of 1 where all are alike.

    Args:
      query_Q, key_P: positions, int32.
      window: as in `Scores`.
      mask_BP: nonzero at keys that are no padding; None if none is.
      segments: the numbers of the documents of the queries, int[B, Q], and of the keys, int[B, P].
    """
    seen_QP = query_Q[:, None] >= key_P
    if window is not None:
        seen_QP &= query_Q[:, None] - key_P < window
    seen = seen_QP[None, None, :, None, :]
    if mask_BP is not None:
        seen = seen & (mask_BP != 0)[:, None, None, None, :]
    if segments is not None:
        of_query_BQ, of_key_BP = segments
        same_BQP = of_query_BQ[:, :, None] == of_key_BP[:, None, :]
        seen = seen & same_BQP[:, None, :, None, :]
    return seen
