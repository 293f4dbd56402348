"""Losses of a language model's head that never hold the logits of all positions.

Forward and backward run over chunks of positions. Backward computes the logits of a chunk again and
adds to one float32 gradient of the head.

Shape letters: B batch, L length, D width, V vocabulary; C positions of a chunk, N chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .losses import Head, cross_entropy, head_logits


def head_statistics(
    x_BLD: jax.Array,
    head: jax.Array | Head,
    targets_BL: jax.Array,
    chunk: int,
    with_entropy: bool = False,
) -> tuple[jax.Array, ...]:
    """Return the cross-entropy of each target under the logits x head^T, and with `with_entropy`
    the entropy of each position's distribution: float32[B, L] each, in nats.

    Args:
      x_BLD: the head's input, of any floating dtype.
      head: the head, [V, D] or with its bias, its cap and its scale.
      targets_BL: int[B, L].
      chunk: number of positions whose logits exist at a time, in forward and backward; 0 takes all
        at once.
      with_entropy: whether to return the entropies.

    Cost of chunks: one more product with the head. Memory: B * chunk * V float32 logits,
    and in backward V * D float32 for the head's gradient.

    Raises:
      ValueError: `chunk` is negative.
    """
    if chunk < 0:
        raise ValueError(f"loss_chunk={chunk}: give a number of positions, or 0 for all at once")
    head = head if isinstance(head, Head) else Head(head)
    if not chunk or x_BLD.shape[1] <= chunk:
        return _of_logits(head_logits(x_BLD, head), targets_BL, with_entropy)
    weights = head.weight_VD, head.bias_V
    return _in_chunks(x_BLD, weights, targets_BL, chunk, with_entropy, (head.cap, head.scale))


def _of_logits(
    logits_BCV: jax.Array, targets_BC: jax.Array, with_entropy: bool
) -> tuple[jax.Array, ...]:
    losses_BC = cross_entropy(logits_BCV, targets_BC)
    if not with_entropy:
        return (losses_BC,)
    return losses_BC, _entropy(jax.nn.log_softmax(logits_BCV))


Weights = tuple[jax.Array, jax.Array | None]
"""A head's weight [V, D] and bias [V]."""
Shape = tuple[float | None, float | None]
"""A head's cap and scale."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _in_chunks(
    x_BLD: jax.Array,
    weights: Weights,
    targets_BL: jax.Array,
    chunk: int,
    with_entropy: bool,
    shape: Shape,
) -> tuple[jax.Array, ...]:
    def of_chunk(_: None, part: Any) -> tuple[None, tuple[jax.Array, ...]]:
        x_BCD, targets_BC = part
        logits_BCV = head_logits(x_BCD, Head(*weights, *shape))
        return None, _of_logits(logits_BCV, targets_BC, with_entropy)

    return _over_chunks(of_chunk, None, (x_BLD, targets_BL), chunk)[1]


def _forward(
    x_BLD: jax.Array,
    weights: Weights,
    targets_BL: jax.Array,
    chunk: int,
    with_entropy: bool,
    shape: Shape,
) -> tuple[tuple[jax.Array, ...], Any]:
    found = _in_chunks(x_BLD, weights, targets_BL, chunk, with_entropy, shape)
    return found, (x_BLD, weights, targets_BL)


def _backward(
    chunk: int,
    with_entropy: bool,
    shape: Shape,
    residuals: Any,
    cotangents: tuple[jax.Array, ...],
) -> tuple[jax.Array, Weights, None]:
    x_BLD, (head_VD, bias_V), targets_BL = residuals
    cap, scale = shape

    def of_chunk(sums: Weights, part: Any) -> tuple[Weights, jax.Array]:
        x_BCD, targets_BC, cts = part
        logits_BCV = head_logits(x_BCD, Head(head_VD, bias_V, *shape))
        logprobs_BCV = jax.nn.log_softmax(logits_BCV)
        probs_BCV = jnp.exp(logprobs_BCV)
        hits_BCV = targets_BC[..., None] == jnp.arange(head_VD.shape[0], dtype=targets_BC.dtype)
        ct_BCV = cts[0][..., None] * (probs_BCV - hits_BCV)
        if with_entropy:
            entropy_BC = _entropy(logprobs_BCV)
            ct_BCV -= cts[1][..., None] * probs_BCV * (logprobs_BCV + entropy_BC[..., None])
        if cap is not None:
            ct_BCV *= 1 - (logits_BCV / cap) ** 2
        if scale is not None:
            ct_BCV *= scale
        head_ct_VD, bias_ct_V = sums
        if bias_ct_V is not None:
            bias_ct_V += ct_BCV.sum(axis=(0, 1))
        # The two products run in the dtype of the model, and add up in float32.
        ct_BCV = ct_BCV.astype(x_BCD.dtype)
        head_ct_VD += _product("bcv,bcd->vd", ct_BCV, x_BCD)
        x_ct_BCD = _product("bcv,vd->bcd", ct_BCV, head_VD).astype(x_BCD.dtype)
        return (head_ct_VD, bias_ct_V), x_ct_BCD

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (head_VD, bias_V))
    parts = (x_BLD, targets_BL, cotangents)
    sums, x_ct_BLD = _over_chunks(of_chunk, zeros, parts, chunk)
    weights_ct = jax.tree.map(lambda ct, x: ct.astype(x.dtype), sums, (head_VD, bias_V))
    return x_ct_BLD, weights_ct, None


_in_chunks.defvjp(_forward, _backward)


def _entropy(logprobs_BCV: jax.Array) -> jax.Array:
    return -(jnp.exp(logprobs_BCV) * logprobs_BCV).sum(axis=-1)


def _product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


def _over_chunks(
    turn: Callable[[Any, Any], tuple[Any, Any]], carry: Any, arrays: Any, chunk: int
) -> tuple[Any, Any]:
    """Run `turn` over chunks of positions, in order: `lax.scan` along dim 1 of [B, L, ...].

    Args:
      turn: (carry, chunks [B, C, ...] of the arrays) -> (carry, results [B, C, ...]).
      carry: a pytree; the first carry.
      arrays: a pytree of arrays [B, L, ...].
      chunk: positions of a chunk, fewer than L. What does not fill a chunk is one more turn.

    Returns:
      The last carry, and the results [B, L, ...].
    """
    length = jax.tree.leaves(arrays)[0].shape[1]
    whole = length // chunk * chunk

    def cut(x: jax.Array) -> jax.Array:
        x_BNC = x[:, :whole].reshape(x.shape[0], whole // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(x_BNC, 1, 0)

    def joined(x_NBC: jax.Array) -> jax.Array:
        x_BNC = jnp.moveaxis(x_NBC, 0, 1)
        return x_BNC.reshape(x_BNC.shape[0], whole, *x_BNC.shape[3:])

    carry, results = lax.scan(turn, carry, jax.tree.map(cut, arrays))
    results = jax.tree.map(joined, results)
    if whole < length:
        carry, rest = turn(carry, jax.tree.map(lambda x: x[:, whole:], arrays))
        results = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), results, rest)
    return carry, results
