"""Draws tokens one after another, in a compiled loop: all of them, or some turns of the loop.

Shape letters: B rows, N new tokens, T turns, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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
      read_prompts: reads the prompts, and returns the model's memory of them.
      token: int32[B], the token that each row reads first.
      unread: the tokens that follow it in the prompts; None if it is the last one of each.
    """

    next_logits: NextLogits
    read_prompts: Callable[[], Any]
    token: jax.Array
    unread: Unread | None = None


class Drawn(NamedTuple):
    """What a turn of decoding draws: a token of each row, but for those that read or have ended.

    Attributes:
      number_B: int32[B], how many tokens the row had drawn before; N where it draws none now.
      token_B: int32[B]; `pad` where the row draws none.
      logprob_B: float32[B]; 0 where the row draws none.
      draws_B: bool[B], whether the row draws one.
    """

    number_B: jax.Array
    token_B: jax.Array
    logprob_B: jax.Array
    draws_B: jax.Array


Carry = dict[str, Any]
"""What decoding keeps from turn to turn: `turn`, an int32 that counts turns; `memory`; `token`
int32[B], which each row reads next; and of each row `done`, `finite` (whether its tokens were drawn
from distributions) and `lengths`, the number of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Draws a token of each row in a turn.

    Attributes:
      start: where decoding begins.
      keys_B: a PRNG key for each row.
      options: the int32 scalars `new` (the most tokens to draw, at most N) and `pad`; `eos`
        int32[E], the tokens that end a row (below 0 means none); and `numbers` of `Sampling`.
      shape: the shape that the program is compiled for.
    """

    start: DecodeStart
    keys_B: jax.Array
    options: dict[str, Any]
    shape: DecodeShape

    def begin(self) -> Carry:
        """Read the prompts; return what the first turn begins with."""
        rows = self.shape.rows
        return {
            "turn": jnp.int32(0),
            "memory": self.start.read_prompts(),
            "token": self.start.token,
            "done": jnp.zeros(rows, bool),
            "finite": jnp.ones(rows, bool),
            "lengths": jnp.zeros(rows, jnp.int32),
        }

    def turn(self, carry: Carry) -> tuple[Carry, Drawn]:
        """Draw one token of each row that draws."""
        shape, unread, options = self.shape, self.start.unread, self.options
        turn, done_B = carry["turn"], carry["done"]
        logits_BV, memory = self.start.next_logits(carry["memory"], carry["token"], turn)
        # The number of each row's new token; below 0 while the row still reads its prompt.
        i_B = jnp.full(shape.rows, turn) if unread is None else turn - unread.behind
        draws_B = ~done_B & (i_B >= 0)
        keys = jax.vmap(jax.random.fold_in)(self.keys_B, jnp.maximum(i_B, 0))
        numbers = options["numbers"]
        chosen_B = sample(keys, logits_BV, numbers, greedy=shape.greedy, filtered=shape.filtered)
        logprob_B = jnp.where(draws_B, log_probs(logits_BV, chosen_B), 0.0)
        token_B = jnp.where(draws_B, chosen_B, options["pad"])
        # Models rule tokens out by -inf. With NaN, +inf or no token left the sum is not finite.
        finite_B = jnp.isfinite(jax.nn.logsumexp(logits_BV, axis=-1))
        next_B = token_B
        if unread is not None:
            place = jnp.minimum(unread.first + turn + 1, unread.prompt.shape[1] - 1)
            next_B = jnp.where(i_B < 0, unread.prompt[:, place], token_B)
        ends_B = (token_B[:, None] == options["eos"]).any(axis=-1) | (i_B + 1 >= options["new"])
        after = {
            "turn": turn + 1,
            "memory": memory,
            "token": next_B,
            "done": done_B | (draws_B & ends_B),
            "finite": carry["finite"] & (finite_B | ~draws_B),
            "lengths": carry["lengths"] + draws_B,
        }
        number_B = jnp.where(draws_B, i_B, shape.new)  # Past the end, where nothing is written.
        return after, Drawn(number_B, token_B, logprob_B, draws_B)


def decode(decoder: Decoder) -> dict[str, jax.Array]:
    """Draw tokens until every row has met its end, or has as many tokens as it may.

    Returns:
      `tokens` int32[B, N], `logprobs` float32[B, N], `lengths` int32[B], and `finite` bool[B]:
      whether each of the row's tokens was drawn from a distribution.
    """
    shape = decoder.shape
    rows, grid = jnp.arange(shape.rows), (shape.rows, shape.new)

    def goes_on(state: Any) -> jax.Array:
        return ~jnp.all(state[0]["done"])

    def draw(state: Any) -> Any:
        carry, tokens_BN, logprobs_BN = state
        carry, drawn = decoder.turn(carry)
        place = rows, drawn.number_B
        tokens_BN = tokens_BN.at[place].set(drawn.token_B, mode="drop")
        return carry, tokens_BN, logprobs_BN.at[place].set(drawn.logprob_B, mode="drop")

    tokens_BN = jnp.full(grid, decoder.options["pad"], jnp.int32)
    first = decoder.begin(), tokens_BN, jnp.zeros(grid, jnp.float32)
    with jax.named_scope("decode"):
        end, tokens_BN, logprobs_BN = lax.while_loop(goes_on, draw, first)
    drawn = {"tokens": tokens_BN, "logprobs": logprobs_BN}
    return {**drawn, "lengths": end["lengths"], "finite": end["finite"]}


def decode_turns(
    decoder: Decoder, carry: Carry, num_turns: int
) -> tuple[Carry, dict[str, jax.Array]]:
    """Take some turns of decoding, fewer if every row has met its end before.

    Returns:
      What the next turns begin with; and `tokens` int32[B, T], `logprobs` float32[B, T], `drawn`
      bool[B, T] (whether the row drew a token in the turn), `running` bool[B, T] (whether it draws
      more after it), and `finite` bool[B].
    """
    first, grid = carry["turn"], (decoder.shape.rows, num_turns)

    def goes_on(state: Any) -> jax.Array:
        carry, _ = state
        return (carry["turn"] - first < num_turns) & ~jnp.all(carry["done"])

    def draw(state: Any) -> Any:
        carry, found = state
        place = carry["turn"] - first
        carry, drawn = decoder.turn(carry)
        new = {
            "tokens": drawn.token_B,
            "logprobs": drawn.logprob_B,
            "drawn": drawn.draws_B,
            "running": ~carry["done"],
        }
        return carry, {name: found[name].at[:, place].set(x) for name, x in new.items()}

    none = {
        "tokens": jnp.full(grid, decoder.options["pad"], jnp.int32),
        "logprobs": jnp.zeros(grid, jnp.float32),
        "drawn": jnp.zeros(grid, bool),
        "running": jnp.zeros(grid, bool),
    }
    with jax.named_scope("decode"):
        carry, found = lax.while_loop(goes_on, draw, (carry, none))
    return carry, {**found, "finite": carry["finite"]}
