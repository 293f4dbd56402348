"""Batches and losses that models share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from gauntlet_parts.case import ROWS

VOCABULARY = 96


def tokens(length: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    """Return random tokens, int32[ROWS, length], from 3 on: the first ones mean padding to some."""
    numbers = np.random.default_rng(0).integers(3, vocabulary, (ROWS, length))
    return numbers.astype(np.int32)


def floats(*shape: int) -> np.ndarray:
    """Return random numbers, float32[ROWS, *shape]."""
    return np.random.default_rng(1).normal(size=(ROWS, *shape)).astype(np.float32)


def labels(classes: int) -> np.ndarray:
    """Return random classes, int32[ROWS]."""
    return np.random.default_rng(2).integers(0, classes, ROWS).astype(np.int32)


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Return the mean cross entropy of logits [..., C] and whole numbers [...]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return losses.mean()


def next_token(logits: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the loss of a language model on batches {"tokens": int[B, L + 1]}."""

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        del train
        row = batch["tokens"]
        return cross_entropy(logits(apply, row[:, :-1]), row[:, 1:])

    return loss


def classification(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss of `call(apply, batch, train) -> logits [B, ..., C]` on batches with the
    entry "label"."""

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        return cross_entropy(call(apply, batch, train), batch["label"])

    return loss


def distance(outputs: Any) -> Any:
    """Return the mean square distance of an array's rows, or of those of a tree's first array, to
    fixed waves."""
    import jax

    out = jax.tree.leaves(outputs)[0]
    if jnp.iscomplexobj(out):
        out = jnp.abs(out)
    out = out.astype(jnp.float32)
    waves = jnp.cos(jnp.arange(out[0].size)).reshape(out.shape[1:])
    return jnp.mean(jnp.square(out - waves))


def to_waves(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the loss `distance` of `call(apply, batch, train)`."""

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        return distance(call(apply, batch, train))

    return loss
