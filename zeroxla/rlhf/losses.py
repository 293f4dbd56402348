"""The losses of PPO and GRPO as functions of arrays: surrogates, value loss, KL, entropy.

Shape letters: B rows, T targets, V vocabulary. A mask is 1 at the targets that count. A loss is a
mean. Its metrics hold the `weight` of that mean, so that the devices' means can be combined into
the mean of all rows (see `zeroxla.make_step`). All arrays are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Metrics = dict[str, jax.Array]


def target_logprobs(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return the log-probability of each target: float32[B, T]."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return chosen_BT - jax.nn.logsumexp(logits_BTV, axis=-1)


def entropy(logits_BTV: jax.Array) -> jax.Array:
    """Return the entropy of each distribution in nats: float32[B, T]."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32), axis=-1)
    # A token that cannot be drawn has p log p = 0, not 0 * -inf.
    impossible_BTV = jnp.isneginf(logprobs_BTV)
    safe_BTV = jnp.where(impossible_BTV, 0.0, logprobs_BTV)
    return -jnp.where(impossible_BTV, 0.0, jnp.exp(safe_BTV) * safe_BTV).sum(axis=-1)


def kl_estimate(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Return an estimate of KL(policy, reference) from tokens that the policy drew.

    The estimate is exp(d) - d - 1 with d = ref_logprobs - logprobs. It is never negative and
    exactly 0 where both agree. Its mean over tokens that the policy draws is the divergence.

    Args:
      logprobs, ref_logprobs: arrays of the same shape.

    Source: Schulman, "Approximating KL Divergence", k3; GRPO, arXiv 2402.03300, equation 4.
    """
    difference = ref_logprobs - logprobs
    return jnp.expm1(difference) - difference


def masked_mean(x_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (mean over the mask, number of elements that count); the mean of none is 0."""
    mask_BT = mask_BT.astype(jnp.float32)
    weight = mask_BT.sum()
    # Elements that do not count may be NaN and must not reach the gradient: `where`, not a product.
    return jnp.where(mask_BT > 0, x_BT, 0.0).sum() / jnp.maximum(weight, 1), weight


def row_mean(x_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (mean over rows of each row's mean over its mask, number of rows whose mask has a
    1)."""
    mask_BT = mask_BT.astype(jnp.float32)
    counts_B = mask_BT.sum(axis=1)
    rows_B = jnp.where(mask_BT > 0, x_BT, 0.0).sum(axis=1) / jnp.maximum(counts_B, 1)
    weight = (counts_B > 0).astype(jnp.float32).sum()
    return rows_B.sum() / jnp.maximum(weight, 1), weight


def surrogate(
    logprobs_BT: jax.Array, old_logprobs_BT: jax.Array, advantages_BT: jax.Array, *, clip: float
) -> tuple[jax.Array, jax.Array]:
    """Return (-min(ratio A, clip(ratio) A), 1 where the clip decides), both [B, T].

    The ratio is exp(logprobs - old_logprobs), clipped to 1 +- `clip`. Where the clip decides, the
    gradient is 0: the policy has moved far enough there.
    """
    ratio_BT = jnp.exp(logprobs_BT - old_logprobs_BT)
    free_BT = ratio_BT * advantages_BT
    held_BT = jnp.clip(ratio_BT, 1 - clip, 1 + clip) * advantages_BT
    return -jnp.minimum(free_BT, held_BT), (held_BT < free_BT).astype(jnp.float32)


def ppo_loss(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip: float = 0.2,
) -> tuple[jax.Array, Metrics]:
    """Return PPO's clipped loss, a mean over tokens.

    Args:
      logprobs_BT: log-probabilities of the tokens under the policy in training.
      old_logprobs_BT: the same under the policy that drew the tokens.
      advantages_BT: see `gae`.
      mask_BT: the mask of the response.
      clip: the ratio counts within 1 - clip and 1 + clip.

    Returns:
      (loss, {"clipped": share of tokens where the clip decides, "weight": tokens}).

    Source: arXiv 1707.06347, equation 7.
    """
    losses_BT, clipped_BT = surrogate(logprobs_BT, old_logprobs_BT, advantages_BT, clip=clip)
    loss, weight = masked_mean(losses_BT, mask_BT)
    return loss, {"clipped": masked_mean(clipped_BT, mask_BT)[0], "weight": weight}


def grpo_loss(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    ref_logprobs_BT: jax.Array,
    advantages_B: jax.Array,
    mask_BT: jax.Array,
    *,
    clip: float = 0.2,
    kl: float = 0.04,
) -> tuple[jax.Array, Metrics]:
    """Return GRPO's loss: a mean over rows of the mean over a row's tokens of surrogate + kl x
    divergence.

    Args:
      logprobs_BT: log-probabilities of the tokens under the policy in training.
      old_logprobs_BT: the same under the policy that drew the tokens.
      ref_logprobs_BT: the same under the reference.
      advantages_B: one advantage for all tokens of a row, see `group_advantages`.
      mask_BT: the mask of the response.
      clip: the ratio counts within 1 - clip and 1 + clip.
      kl: the penalty per nat of divergence from the reference, see `kl_estimate`.

    Returns:
      (loss, {"clipped", "divergence", "weight": rows}); the metrics are means like the loss.

    Source: DeepSeekMath, arXiv 2402.03300, equation 3.
    """
    losses_BT, clipped_BT = surrogate(
        logprobs_BT, old_logprobs_BT, advantages_B[:, None], clip=clip
    )
    loss, weight = row_mean(losses_BT, mask_BT)
    divergence = row_mean(kl_estimate(logprobs_BT, ref_logprobs_BT), mask_BT)[0]
    metrics = {
        "clipped": row_mean(clipped_BT, mask_BT)[0],
        "divergence": divergence,
        "weight": weight,
    }
    return loss + kl * divergence, metrics


def value_loss(
    values_BT: jax.Array,
    old_values_BT: jax.Array,
    returns_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    clip: float = 0.2,
) -> tuple[jax.Array, Metrics]:
    """Return half the squared error of the critic, a mean over tokens.

    Two errors are compared: the value's own, and the error of the value held within `clip` of the
    old one. The larger counts. So a value that has moved farther than `clip` towards its return is
    not pulled on.

    Args:
      values_BT: values of the critic in training.
      old_values_BT: values of the critic when the advantages were computed.
      returns_BT: see `gae`.
      mask_BT: the mask of the response.
      clip: how far a value may move in an iteration.

    Returns:
      (loss, {"clipped": share of tokens where the clip decides, "weight": tokens}).

    Source: as in OpenAI's baselines (ppo2); arXiv 2006.05990, section 3.
    """
    moved_BT = values_BT - old_values_BT
    held_BT = old_values_BT + jnp.clip(moved_BT, -clip, clip)
    # Within the clip the value is its own, and not one that differs by a rounding.
    held_BT = jnp.where(jnp.abs(moved_BT) <= clip, values_BT, held_BT)
    free_BT, held_BT = (values_BT - returns_BT) ** 2, (held_BT - returns_BT) ** 2
    loss, weight = masked_mean(0.5 * jnp.maximum(free_BT, held_BT), mask_BT)
    clipped = masked_mean((held_BT > free_BT).astype(jnp.float32), mask_BT)[0]
    return loss, {"clipped": clipped, "weight": weight}
