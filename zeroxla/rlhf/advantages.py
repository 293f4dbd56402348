"""Turns scores into advantages: rewards of tokens, generalized advantage estimation, groups.

Shape letters: B rows, T targets (the tokens of a row but its first), G rows of a group. A mask is 1
at the targets of the response, which are one run in each row, and 0 at the prompt and at padding.
All arrays are float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

EPSILON = 1e-6
"""It is added to standard deviations, so that rows that are all alike have the advantage 0."""


def token_rewards(
    scores_B: jax.Array,
    logprobs_BT: jax.Array,
    ref_logprobs_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    kl: float,
) -> jax.Array:
    """Return the reward of each token: a penalty for straying from the reference, plus the score at
    the last token.

    Args:
      scores_B: the scores of whole responses.
      logprobs_BT: log-probabilities of the tokens under the policy that drew them.
      ref_logprobs_BT: the same under the reference.
      mask_BT: the mask of the response.
      kl: the penalty per nat of `logprobs - ref_logprobs`.

    Returns:
      float32[B, T], 0 outside the response; a row without a response has no reward at all.

    Source: InstructGPT, arXiv 2203.02155, section 3.5.
    """
    mask_BT = mask_BT.astype(jnp.float32)
    # Outside the response both may hold anything, NaN included.
    strayed_BT = jnp.where(mask_BT > 0, logprobs_BT - ref_logprobs_BT, 0.0)
    return scores_B[:, None] * (mask_BT - mask_BT * _next(mask_BT)) - kl * strayed_BT


def gae(
    rewards_BT: jax.Array,
    values_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[jax.Array, jax.Array]:
    """Return advantages and returns by generalized advantage estimation.

    With d_t = r_t + gamma v_{t+1} - v_t the advantage is A_t = d_t + gamma lam A_{t+1}, from the
    last token of the response backwards. After the last token the value is 0, even if the response
    was cut at its longest length.

    Args:
      rewards_BT: the reward for drawing each token.
      values_BT: the critic's values of the text before each token.
      mask_BT: the mask of the response.
      gamma: the discount; a reward counts gamma times as much one token earlier.
      lam: 0 looks one token ahead and has little variance; 1 looks at all later tokens and has no
        bias.

    Returns:
      (advantages, returns), float32[B, T], 0 outside the response. Returns are advantages + values;
      the critic learns them.

    Cost: a scan over T.

    Source: arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347, equation 11.
    """
    here_BT = mask_BT.astype(jnp.float32) > 0
    rewards_BT = jnp.where(here_BT, rewards_BT, 0.0).astype(jnp.float32)
    values_BT = jnp.where(here_BT, values_BT, 0.0).astype(jnp.float32)
    delta_BT = rewards_BT + gamma * _next(values_BT) - values_BT

    def backwards(later_B: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        delta_B, here_B = now
        advantage_B = jnp.where(here_B, delta_B + gamma * lam * later_B, 0.0)
        return advantage_B, advantage_B

    start_B = jnp.zeros(delta_BT.shape[0], jnp.float32)
    _, advantages_TB = lax.scan(backwards, start_B, (delta_BT.T, here_BT.T), reverse=True)
    return advantages_TB.T, jnp.where(here_BT, advantages_TB.T + values_BT, 0.0)


def whiten(values_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Return values with mean 0 and standard deviation 1 over the mask; 0 outside of it."""
    mask_BT = mask_BT.astype(jnp.float32)
    values_BT = jnp.where(mask_BT > 0, values_BT, 0.0)
    count = jnp.maximum(mask_BT.sum(), 1)
    centered_BT = (values_BT - values_BT.sum() / count) * mask_BT
    return centered_BT / (jnp.sqrt((centered_BT**2).sum() / count) + EPSILON)


def group_advantages(scores_B: jax.Array, group: int) -> jax.Array:
    """Return the advantage of each row over the others with the same prompt.

    The advantage is (score - mean) / (standard deviation + 1e-6) within each run of `group` rows.
    The deviation is the group's own (over G, not G - 1).

    Args:
      scores_B: float[B]; rows with the same prompt are next to each other.
      group: G, the number of rows with one prompt.

    Raises:
      ValueError: B is no multiple of `group`, or `group` is below 2, so that there is no other row
        to compare with.

    Source: GRPO in DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    if group < 2 or scores_B.shape[0] % group:
        raise ValueError(
            f"{scores_B.shape[0]} rows do not make groups of {group}; a group has 2 rows or more, "
            "and all have as many"
        )
    scores_NG = scores_B.astype(jnp.float32).reshape(-1, group)
    centered_NG = scores_NG - scores_NG.mean(axis=1, keepdims=True)
    deviation_N1 = jnp.sqrt((centered_NG**2).mean(axis=1, keepdims=True))
    return (centered_NG / (deviation_N1 + EPSILON)).reshape(-1)


def _next(x_BT: jax.Array) -> jax.Array:
    """Return each row shifted one place to the left, with 0 at the end."""
    return jnp.pad(x_BT[:, 1:], ((0, 0), (0, 1)))
