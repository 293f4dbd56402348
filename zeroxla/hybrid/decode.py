"""Draws tokens one after another, in one compiled loop.

Shape letters: B rows, N new tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.hybrid.sampling import log_probs, sample

NextLogits = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(memory, token int32[B], index) -> (logits [B, V] of the next token, memory).

`memory` is whatever the model keeps of earlier tokens; `index` counts new tokens from 0.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """The shape, and the way of choosing tokens, that a program is compiled for.

    Attributes:
      rows: the number of rows of one device.
      prompt: the number of prompt places, padding included.
      new: the most new tokens of a row.
      greedy, filtered: as for `sampling.sample`.
    """

    rows: int
    prompt: int
    new: int
    greedy: bool = False
    filtered: bool = False


def decode(
    next_logits: NextLogits,
    memory: Any,
    token_B: jax.Array,
    keys_B: jax.Array,
    options: dict[str, Any],
    shape: DecodeShape,
) -> dict[str, jax.Array]:
    """Draw tokens until every row has met its end, or has as many tokens as it may.

    Args:
      next_logits: computes the logits of the next token.
      memory: the model's memory of the prompts, the last token of each aside.
      token_B: int32, the last token of each prompt.
      keys_B: a PRNG key for each row.
      options: the int32 scalars `new` (the most tokens to draw, at most N), `eos` (the token that
        ends a row; below 0 means none) and `pad`; and `numbers` of `Sampling`.
      shape: the shape that the program is compiled for.

    Returns:
      `tokens` int32[B, N], `logprobs` float32[B, N], `lengths` int32[B], and `finite` bool[B]:
      whether each of the row's tokens was drawn from a distribution.
    """
    eos, pad = options["eos"], options["pad"]

    def goes_on(carry: dict[str, Any]) -> jax.Array:
        return (carry["i"] < options["new"]) & ~jnp.all(carry["done"])

    def draw(carry: dict[str, Any]) -> dict[str, Any]:
        i, done_B = carry["i"], carry["done"]
        logits_BV, memory = next_logits(carry["memory"], carry["token"], i)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
        numbers = options["numbers"]
        chosen_B = sample(keys, logits_BV, numbers, greedy=shape.greedy, filtered=shape.filtered)
        logprob_B = jnp.where(done_B, 0.0, log_probs(logits_BV, chosen_B))
        token_B = jnp.where(done_B, pad, chosen_B)
        # Models rule tokens out by -inf. With NaN, +inf or no token left the sum is not finite.
        finite_B = jnp.isfinite(jax.nn.logsumexp(logits_BV, axis=-1))
        return {
            "i": i + 1,
            "memory": memory,
            "token": token_B,
            "done": done_B | (token_B == eos),
            "finite": carry["finite"] & (finite_B | done_B),
            "lengths": carry["lengths"] + ~done_B,
            "tokens": lax.dynamic_update_slice(carry["tokens"], token_B[:, None], (0, i)),
            "logprobs": lax.dynamic_update_slice(carry["logprobs"], logprob_B[:, None], (0, i)),
        }

    grid = (shape.rows, shape.new)
    no_B = jnp.zeros(shape.rows, bool)
    start = {
        "i": jnp.int32(0),
        "memory": memory,
        "token": token_B,
        "done": no_B,
        "finite": ~no_B,
        "lengths": jnp.zeros(shape.rows, jnp.int32),
        "tokens": jnp.full(grid, pad, jnp.int32),
        "logprobs": jnp.zeros(grid, jnp.float32),
    }
    with jax.named_scope("decode"):
        end = lax.while_loop(goes_on, draw, start)
    return {name: end[name] for name in ("tokens", "logprobs", "lengths", "finite")}
