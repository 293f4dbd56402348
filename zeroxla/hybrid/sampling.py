"""Chooses a token from logits: temperature first, then top-k, then top-p.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen. The numbers are traced, so new numbers need no new program.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: the number of likeliest tokens to draw from; None draws from all.
      top_p: draw from the fewest likeliest tokens that reach this probability; 1 draws from all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 or more")
        if self.top_k is not None and (self.top_k != int(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k} must be a whole number, 1 or more, or None")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0, and 1 at most")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing is drawn."""
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are drawn, and only from some of them."""
        return not self.is_greedy and (self.top_k is not None or self.top_p < 1)

    @property
    def numbers(self) -> tuple[np.float32, np.int32, np.float32]:
        """temperature, top_k and top_p as scalars; a top_k of None is the largest int32."""
        top_k = np.iinfo(np.int32).max if self.top_k is None else self.top_k
        return np.float32(self.temperature), np.int32(top_k), np.float32(self.top_p)


def sample(
    keys_B: jax.Array,
    logits_BV: jax.Array,
    numbers: tuple[jax.Array, jax.Array, jax.Array],
    *,
    greedy: bool,
    filtered: bool,
) -> jax.Array:
    """Choose a token for each row.

    Args:
      keys_B: a PRNG key for each row, so that no row's token depends on another row.
      logits_BV: float32 logits.
      numbers: `Sampling.numbers`.
      greedy: take the likeliest token, or the first of several equally likely ones.
      filtered: apply top-k and top-p, which takes a sort.

    Returns:
      int32[B]. The likeliest token can always be drawn, whatever top-k and top-p are.
    """
    if greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    temperature, top_k, top_p = numbers
    scaled_BV = logits_BV / temperature
    if not filtered:
        return jax.vmap(jax.random.categorical)(keys_B, scaled_BV).astype(jnp.int32)
    order_BV = jnp.argsort(scaled_BV, axis=-1, descending=True, stable=True)
    sorted_BV = jnp.take_along_axis(scaled_BV, order_BV, axis=-1)
    sorted_BV = jnp.where(jnp.arange(sorted_BV.shape[-1]) < top_k, sorted_BV, -jnp.inf)
    # A token that top-k left stays if the likelier ones together do not reach top_p.
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    sorted_BV = jnp.where(before_BV < top_p, sorted_BV, -jnp.inf)
    place_B = jax.vmap(jax.random.categorical)(keys_B, sorted_BV)
    return jnp.take_along_axis(order_BV, place_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def log_probs(logits_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    """Return the log-probabilities of tokens under the model itself (temperature 1): float32[B]."""
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
