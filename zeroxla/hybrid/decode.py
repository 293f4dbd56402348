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

`memory` is whatever the model keeps of earlier tokens; `index` counts the loop's turns from 0.
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """The tokens of prompts that the decoding loop still has to read, for rows that begin together.

    Attributes:
      prompt: int32[B, P], padded on the right.
      first: the place of the tokens that the loop reads first.
      behind: int32[B], the number of tokens of each prompt after that place.
    """

    prompt: jax.Array
    first: jax.Array
    behind: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStart:
    """Where decoding begins.

    Attributes:
      next_logits: computes the logits of the next token.
      memory: the model's memory of the tokens before.
      token: int32[B], the token that each row reads first.
      unread: the tokens that follow it in the prompts; None if it is the last one of each.
    """

    next_logits: NextLogits
    memory: Any
    token: jax.Array
    unread: Unread | None = None


def decode(
    start: DecodeStart, keys_B: jax.Array, options: dict[str, Any], shape: DecodeShape
) -> dict[str, jax.Array]:
    """Draw tokens until every row has met its end, or has as many tokens as it may.

    Args:
      start: where decoding begins.
      keys_B: a PRNG key for each row.
      options: the int32 scalars `new` (the most tokens to draw, at most N), `eos` (the token that
        ends a row; below 0 means none) and `pad`; and `numbers` of `Sampling`.
      shape: the shape that the program is compiled for.

    Returns:
      `tokens` int32[B, N], `logprobs` float32[B, N], `lengths` int32[B], and `finite` bool[B]:
      whether each of the row's tokens was drawn from a distribution.
    """
    eos, pad, unread = options["eos"], options["pad"], start.unread
    rows = jnp.arange(shape.rows)

    def goes_on(carry: dict[str, Any]) -> jax.Array:
        return ~jnp.all(carry["done"])

    def draw(carry: dict[str, Any]) -> dict[str, Any]:
        turn, done_B = carry["turn"], carry["done"]
        logits_BV, memory = start.next_logits(carry["memory"], carry["token"], turn)
        # The number of each row's new token; below 0 while the row still reads its prompt.
        i_B = jnp.full(shape.rows, turn) if unread is None else turn - unread.behind
        draws_B = ~done_B & (i_B >= 0)
        keys = jax.vmap(jax.random.fold_in)(keys_B, jnp.maximum(i_B, 0))
        numbers = options["numbers"]
        chosen_B = sample(keys, logits_BV, numbers, greedy=shape.greedy, filtered=shape.filtered)
        logprob_B = jnp.where(draws_B, log_probs(logits_BV, chosen_B), 0.0)
        token_B = jnp.where(draws_B, chosen_B, pad)
        # Models rule tokens out by -inf. With NaN, +inf or no token left the sum is not finite.
        finite_B = jnp.isfinite(jax.nn.logsumexp(logits_BV, axis=-1))
        place_B = jnp.where(draws_B, i_B, shape.new)  # Past the end, where nothing is written.
        next_B = token_B
        if unread is not None:
            place = jnp.minimum(unread.first + turn + 1, unread.prompt.shape[1] - 1)
            next_B = jnp.where(i_B < 0, unread.prompt[:, place], token_B)
        return {
            "turn": turn + 1,
            "memory": memory,
            "token": next_B,
            "done": done_B | (draws_B & ((token_B == eos) | (i_B + 1 >= options["new"]))),
            "finite": carry["finite"] & (finite_B | ~draws_B),
            "lengths": carry["lengths"] + draws_B,
            "tokens": carry["tokens"].at[rows, place_B].set(token_B, mode="drop"),
            "logprobs": carry["logprobs"].at[rows, place_B].set(logprob_B, mode="drop"),
        }

    grid = (shape.rows, shape.new)
    no_B = jnp.zeros(shape.rows, bool)
    first = {
        "turn": jnp.int32(0),
        "memory": start.memory,
        "token": start.token,
        "done": no_B,
        "finite": ~no_B,
        "lengths": jnp.zeros(shape.rows, jnp.int32),
        "tokens": jnp.full(grid, pad, jnp.int32),
        "logprobs": jnp.zeros(grid, jnp.float32),
    }
    with jax.named_scope("decode"):
        end = lax.while_loop(goes_on, draw, first)
    return {name: end[name] for name in ("tokens", "logprobs", "lengths", "finite")}
