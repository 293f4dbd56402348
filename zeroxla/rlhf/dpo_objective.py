"""DPO's loss as a function of arrays, its settings, and the loss that a training step minimises.

Shape letters: B pairs, L tokens of a row, T = L - 1 targets. A pair is two responses to one prompt,
of which one was preferred. All arrays are float32 unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.rlhf.losses import Metrics, masked_mean
from zeroxla.rlhf.objectives import Loss, row_logprobs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DpoSettings:
    """How pairs of responses are trained on."""

    length: int
    """L, the number of tokens in a row: a prompt, one response and padding."""
    rows: int
    """B, the number of pairs in an optimizer step, over all devices."""
    beta: float = 0.1
    """Strength of the reference: a nat by which the actor prefers a response more than the
    reference does counts as this much reward."""
    label_smoothing: float = 0.0
    """The share of pairs whose preference is taken to be wrong (cDPO); below 0.5."""
    length_normalized: bool = False
    """Take the mean log-probability of a response's tokens, and not their sum."""

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be {least} or more")
        if not self.beta > 0:
            raise ValueError(f"beta={self.beta} must be above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be 0 or more and below 0.5, where "
                "preferences mean nothing"
            )

    def of_rows(self, logprobs_BT: Any, mask_BT: Any) -> Any:
        """Return what a response counts: the sum of its targets' log-probabilities, or their mean
        if `length_normalized`, [B]; of NumPy or JAX arrays. The one of no target is 0."""
        xp = np if isinstance(logprobs_BT, np.ndarray) else jnp
        # Elements that do not count may be NaN and must not reach the gradient.
        sums_B = xp.where(mask_BT > 0, logprobs_BT, 0.0).sum(axis=1)
        if not self.length_normalized:
            return sums_B
        return sums_B / xp.maximum((mask_BT > 0).sum(axis=1), 1)


def dpo_loss(
    chosen_B: jax.Array,
    rejected_B: jax.Array,
    ref_chosen_B: jax.Array,
    ref_rejected_B: jax.Array,
    mask_B: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """Return the loss of direct preference optimisation, a mean over pairs.

    The reward of a response is beta x (log actor - log reference), and the margin of a pair is the
    reward of the chosen response minus the one of the rejected response. The loss is
    -log sigmoid(margin). With label smoothing e it is -(1 - e) log sigmoid(margin) - e log
    sigmoid(-margin).

    Args:
      chosen_B, rejected_B: log-probabilities of whole responses under the policy in training.
      ref_chosen_B, ref_rejected_B: the same under the reference.
      mask_B: 1 for the pairs that count.
      beta: nats to reward.
      label_smoothing: the share of pairs whose preference is taken to be wrong.

    Returns:
      (loss, {"margin", "accuracy": share of pairs whose margin is above 0, "chosen_reward",
      "rejected_reward", "weight": pairs}); the metrics are means like the loss.

    Source: DPO, arXiv 2305.18290, equation 7; label smoothing as in "A note on DPO with noisy
    preferences" (cDPO), equation 3.
    """
    rewards_B = beta * (chosen_B - ref_chosen_B), beta * (rejected_B - ref_rejected_B)
    # A pair that does not count may be NaN and must not reach the gradient.
    margin_B = jnp.where(mask_B > 0, rewards_B[0] - rewards_B[1], 0.0)
    losses_B = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin_B)
    losses_B = losses_B - label_smoothing * jax.nn.log_sigmoid(-margin_B)
    loss, weight = masked_mean(losses_B, mask_B)
    metrics = {
        "margin": margin_B,
        "accuracy": (margin_B > 0).astype(jnp.float32),
        "chosen_reward": rewards_B[0],
        "rejected_reward": rewards_B[1],
    }
    means = {name: masked_mean(x_B, mask_B)[0] for name, x_B in metrics.items()}
    return loss, {**means, "weight": weight}


def preference_loss(settings: DpoSettings) -> Loss:
    """Return the loss of the policy: `loss=` of `make_step`.

    A batch holds the columns of `pair_shapes`. Chosen and rejected rows go through the model
    together; dropout is off. A pair of which a response has no target counts nothing.
    """

    def loss(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> tuple[jax.Array, Metrics]:
        tokens = jnp.concatenate([batch["chosen"], batch["rejected"]])
        masks = jnp.concatenate([batch["chosen_mask"], batch["rejected_mask"]])
        chosen_B, rejected_B = jnp.split(settings.of_rows(row_logprobs(apply, tokens), masks), 2)
        both_B = jnp.split((masks > 0).any(axis=1), 2)
        return dpo_loss(
            chosen_B,
            rejected_B,
            batch["ref_chosen"],
            batch["ref_rejected"],
            (both_B[0] & both_B[1]).astype(jnp.float32),
            beta=settings.beta,
            label_smoothing=settings.label_smoothing,
        )

    return loss


def pair_shapes(settings: DpoSettings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch. The step must see them before it has a state."""
    rows, length = settings.rows, settings.length
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
    mask = jax.ShapeDtypeStruct((rows, length - 1), np.float32)
    reference = jax.ShapeDtypeStruct((rows,), np.float32)
    shapes = {"chosen": tokens, "rejected": tokens, "chosen_mask": mask, "rejected_mask": mask}
    return {**shapes, "ref_chosen": reference, "ref_rejected": reference}
