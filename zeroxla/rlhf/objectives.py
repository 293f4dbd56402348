"""The losses that the training steps of actor and critic minimise: `loss=` of `make_step`.

A batch holds columns of rollouts, [B, L] tokens and [B, T] values of its T = L - 1 targets. Dropout
is off, as it was when the responses were drawn. The critic is a language model of any kind: its
first logit is the value, so no model is changed for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zeroxla.rlhf.losses import (
    Metrics,
    entropy,
    grpo_loss,
    masked_mean,
    ppo_loss,
    row_mean,
    target_logprobs,
    value_loss,
)
from zeroxla.rlhf.settings import Settings

Loss = Callable[..., tuple[jax.Array, Metrics]]


def actor_loss(settings: Settings) -> Loss:
    """Return the loss of the policy.

    Its metrics are `entropy` in nats, `clipped` (the share of tokens that the clip holds), and with
    GRPO `divergence` from the reference.
    """
    algorithm = {"ppo": _ppo, "grpo": _grpo}[settings.algorithm]
    mean = {"ppo": masked_mean, "grpo": row_mean}[settings.algorithm]

    def loss(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> tuple[jax.Array, Metrics]:
        logprobs_BT, entropies_BT = _statistics(apply, batch["tokens"])
        policy, metrics = algorithm(settings, logprobs_BT, batch)
        bonus = mean(entropies_BT, batch["mask"])[0]
        return policy - settings.entropy * bonus, {**metrics, "entropy": bonus}

    return loss


def _statistics(apply: Any, tokens_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of each target, and the entropy of each target's distribution, in
    nats: float32[B, T] each.

    A model whose call takes `targets_BL` and `with_entropy`, as those of zeroxla do, computes both
    without holding all logits. Any other model returns its logits.
    """
    inputs_BT, targets_BT = tokens_BL[:, :-1], tokens_BL[:, 1:]
    if {"targets_BL", "with_entropy"} <= set(inspect.signature(apply).parameters):
        losses_BT, entropies_BT = apply(inputs_BT, targets_BL=targets_BT, with_entropy=True)
        return -losses_BT, entropies_BT
    logits_BTV = apply(inputs_BT)
    return target_logprobs(logits_BTV, targets_BT), entropy(logits_BTV)


def row_logprobs(apply: Any, tokens_BL: jax.Array) -> jax.Array:
    """Return the log-probability of each target in nats, float32[B, T].

    A model whose call takes `targets_BL` computes them without holding all logits.
    """
    inputs_BT, targets_BT = tokens_BL[:, :-1], tokens_BL[:, 1:]
    if "targets_BL" in inspect.signature(apply).parameters:
        return -apply(inputs_BT, targets_BL=targets_BT)
    return target_logprobs(apply(inputs_BT), targets_BT)


def critic_loss(settings: Settings) -> Loss:
    """Return the loss of the critic. Its metric is `clipped`, the share of tokens that the clip
    holds."""

    def loss(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> tuple[jax.Array, Metrics]:
        # The critic's expectation before a token is drawn stands at the place of that target.
        values_BT = apply(batch["tokens"][:, :-1])[..., 0]
        return value_loss(
            values_BT, batch["values"], batch["returns"], batch["mask"], clip=settings.value_clip
        )

    return loss


def batch_shapes(settings: Settings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a minibatch of the actor. Its step must see them before it has a
    state."""
    rows, length = settings.minibatch_rows, settings.length
    targets = jax.ShapeDtypeStruct((rows, length - 1), np.float32)
    shapes = {
        "tokens": jax.ShapeDtypeStruct((rows, length), np.int32),
        "mask": targets,
        "logprobs": targets,
    }
    if settings.algorithm == "ppo":
        return {**shapes, "advantages": targets}
    advantages = jax.ShapeDtypeStruct((rows,), np.float32)
    return {**shapes, "advantages": advantages, "ref_logprobs": targets}


def critic_shapes(settings: Settings) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a minibatch of the critic."""
    shapes = batch_shapes(settings)
    targets = shapes["mask"]
    return {"tokens": shapes["tokens"], "mask": targets, "values": targets, "returns": targets}


def _ppo(
    settings: Settings, logprobs_BT: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Metrics]:
    return ppo_loss(
        logprobs_BT, batch["logprobs"], batch["advantages"], batch["mask"], clip=settings.clip
    )


def _grpo(
    settings: Settings, logprobs_BT: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Metrics]:
    return grpo_loss(
        logprobs_BT,
        batch["logprobs"],
        batch["ref_logprobs"],
        batch["advantages"],
        batch["mask"],
        clip=settings.clip,
        kl=settings.kl_cost,
    )
