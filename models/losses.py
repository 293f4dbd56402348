"""The losses that the models share: cross-entropy of next tokens and of classes, in float32.

Shape letters: B batch, L length, D width, V vocabulary, C classes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Head(NamedTuple):
    """What turns the last activations into logits.

    Attributes:
      weight_VD: the head.
      bias_V: its bias; None for none.
      cap: logits become cap * tanh(logit / cap); None leaves them.
      scale: what logits are multiplied with, before the cap; None for 1.
    """

    weight_VD: jax.Array
    bias_V: jax.Array | None = None
    cap: float | None = None
    scale: float | None = None


def next_token_loss(
    logits_BLV: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean cross-entropy of the next tokens, in nats.

    Args:
      logits_BLV: logits for `tokens[:, :-1]`, in any floating dtype (cast to float32 here).
      batch: "tokens" int[B, L + 1], and optionally "mask" [B, L], nonzero at the targets
        `tokens[:, 1:]` that count.

    Returns:
      (float32 scalar, metrics). Without a mask, metrics is empty. With one it is {"weight": number
      of counted targets}, so that a mean over devices can be weighted.
    """
    return mean_loss(cross_entropy(logits_BLV, batch["tokens"][:, 1:]), batch)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy of each target in nats: [..., V], int[...] -> float32[...]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)


def head_logits(x_BLD: jax.Array, head: jax.Array | Head) -> jax.Array:
    """Return the logits x head^T, float32[B, L, V], with the head's bias, scale and cap."""
    weight_VD, bias_V, cap, scale = head if isinstance(head, Head) else Head(head)
    logits = jnp.einsum("bld,vd->blv", x_BLD, weight_VD, preferred_element_type=jnp.float32)
    if bias_V is not None:
        logits += bias_V.astype(jnp.float32)
    if scale is not None:
        logits *= scale
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def mean_loss(
    losses_BL: jax.Array, batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean of the targets' losses, and metrics; see `next_token_loss`."""
    if "mask" not in batch:
        return losses_BL.mean(), {}
    mask_BL = (batch["mask"] != 0).astype(jnp.float32)
    weight = mask_BL.sum()
    # A slice with nothing to count has loss 0 and weight 0, not 0/0.
    return (losses_BL * mask_BL).sum() / jnp.maximum(weight, 1), {"weight": weight}


def classification_loss(
    logits_BC: jax.Array, label_B: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the mean cross-entropy in nats and {"accuracy": the fraction of right argmaxes}.

    Args:
      logits_BC: class logits in any floating dtype (cast to float32 here).
      label_B: int[B], each in [0, C).
    """
    logits_BC = logits_BC.astype(jnp.float32)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_B)
    hits_B = logits_BC.argmax(axis=-1) == label_B
    return losses_B.mean(), {"accuracy": hits_B.astype(jnp.float32).mean()}
