"""Token by token, in one compiled loop.

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
"""(memory, token int32[B], index) -> (logits [B, V] of the token after it, memory)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """What a program is compiled for.

    Attributes:
      rows: of one device's batch.
      prompt: P.
      new: N.
      greedy, filtered: see `sampling.sample`.
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
    """Draw tokens until each row has met the end or has as many as it may.

    Args:
      next_logits: the model.
      memory: what it keeps.
      token_B: the last token of each prompt.
      keys_B: a PRNG key for each row.
      options: `new` (at most N), `eos` (below 0: none), `pad`, int32 scalars, and `numbers` of
        `Sampling`.
      shape: of the rows.

    Returns:
      `tokens` int32[B, N], `logprobs` float32[B, N], `lengths` int32[B], and `finite` bool[B],
      whether there was a distribution that each token was chosen from.
    """
    eos, pad = options["eos"], options["pad"]

    def going(carry: dict[str, Any]) -> jax.Array:
        return (carry["i"] < options["new"]) & ~jnp.all(carry["done"])

    def draw(carry: dict[str, Any]) -> dict[str, Any]:
        i, done_B = carry["i"], carry["done"]
        logits_BV, memory = next_logits(carry["memory"], carry["token"], i)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
        numbers = options["numbers"]
        chosen_B = sample(keys, logits_BV, numbers, greedy=shape.greedy, filtered=shape.filtered)
        logprob_B = jnp.where(done_B, 0.0, log_probs(logits_BV, chosen_B))
        token_B = jnp.where(done_B, pad, chosen_B)
        # -inf is how a model rules tokens out; with NaN, +inf or nothing left this is not finite.
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
        end = lax.while_loop(going, draw, start)
    return {name: end[name] for name in ("tokens", "logprobs", "lengths", "finite")}
