"""Continues a text with a trained model, by whole forward passes (no cache)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def continue_text(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    length: int,
    temperature: float,
    key: jax.Array,
) -> list[int]:
    """Sample the tokens that follow a prompt.

    Args:
      logits: (params, int32[1, length]) -> float[1, length, V], causal: the logits of a position
        do not depend on later ones.
      params: the parameters that `logits` takes, as whole leaves.
      prompt: one token or more. The model sees the last `length` tokens of prompt and continuation.
      num_tokens: the number of tokens to sample.
      length: the model's window.
      temperature: the divisor of the logits; 0 takes the likeliest token.
      key: a PRNG key.

    Returns:
      The continuation, without the prompt.

    Cost: `num_tokens` forward passes over one window, compiled once.
    """
    total = len(prompt) + num_tokens
    tokens_T = jnp.zeros(max(total, length), jnp.int32)
    tokens_T = tokens_T.at[: len(prompt)].set(jnp.array(list(prompt), jnp.int32))

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

        return jax.lax.fori_loop(len(prompt), total, body, tokens_T)

    return run(params, tokens_T, key)[len(prompt) : total].tolist()
