"""Continue a text with a trained byte model, by whole forward passes (no cache)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.data import SEPARATOR


def continue_text(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: bytes,
    *,
    num_bytes: int,
    length: int,
    temperature: float,
    key: jax.Array,
) -> bytes:
    """Sample `num_bytes` bytes that follow a prompt.

    Args:
      logits: (params, int32[1, length]) -> float[1, length, 256], causal: the logits of a position
        do not depend on later ones.
      params: What `logits` takes, whole leaves.
      prompt: Any bytes; the model sees the last `length` of prompt and continuation. When empty,
        the continuation starts a document.
      num_bytes: How many to sample.
      length: The model's window.
      temperature: Divides the logits; 0 takes the likeliest byte.
      key: PRNG key.

    Returns:
      The continuation alone.

    Cost: `num_bytes` forward passes over one window, compiled once.
    """
    start = prompt or bytes([SEPARATOR])
    total = len(start) + num_bytes
    tokens_T = jnp.zeros(max(total, length), jnp.int32)
    tokens_T = tokens_T.at[: len(start)].set(jnp.array(list(start), jnp.int32))

    def choose(logits_V: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits_V)
        return jax.random.categorical(key, logits_V / temperature)

    @jax.jit
    def run(params: Any, tokens_T: jax.Array, key: jax.Array) -> jax.Array:
        def body(i: jax.Array, tokens_T: jax.Array) -> jax.Array:
            first = jnp.maximum(i - length, 0)
            window_L = jax.lax.dynamic_slice(tokens_T, (first,), (length,))
            logits_V = logits(params, window_L[None])[0, i - 1 - first]
            chosen = choose(logits_V, jax.random.fold_in(key, i))
            return tokens_T.at[i].set(chosen.astype(jnp.int32))

        return jax.lax.fori_loop(len(start), total, body, tokens_T)

    return bytes(run(params, tokens_T, key)[len(start) : total].tolist())
