"""Models whose work on one row is split over axes, of many kinds; sequences have 16 positions.

Every size divides by 4, so that each axis has something to split, unless the model has none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import zeroxla
from tools.equality import GRADIENT_TOLERANCE
from tools.reference import leaf_norms, relative_errors, worst
from zeroxla.frontend import adapt
from zeroxla.models import Mixtral

LENGTH, VOCAB, WIDTH, HEADS, SIZE, CLASSES = 16, 64, 16, 4, 16, 8
SERIES = 64


def tokens(rows: int) -> dict[str, np.ndarray]:
    """Return {"tokens": int32[rows, LENGTH + 1]}."""
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, VOCAB, (rows, LENGTH + 1), np.int32)}


def masked(rows: int) -> dict[str, np.ndarray]:
    """Return tokens, their targets, and which of the targets count: as many in each row."""
    rng = np.random.default_rng(0)
    found = {
        name: rng.integers(0, VOCAB, (rows, LENGTH), np.int32) for name in ("tokens", "targets")
    }
    return {**found, "mask": np.tile(np.arange(LENGTH) % 4 == 1, (rows, 1)).astype(np.float32)}


def images(rows: int) -> dict[str, np.ndarray]:
    """Return {"image": float32[rows, SIZE, SIZE, 4], "label": int32[rows]}."""
    rng = np.random.default_rng(0)
    image = rng.normal(size=(rows, SIZE, SIZE, 4)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, CLASSES, rows, np.int32)}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return -log softmax at the targets."""
    at_targets = jnp.take_along_axis(nn.log_softmax(logits), targets[..., None], axis=-1)
    return -at_targets[..., 0]


class EncoderBlock(nn.Module):
    """A block of an encoder; its norms come after sums, as in BERT, or before."""

    norm_first: bool

    @nn.compact
    def __call__(self, x):
        attend = nn.MultiHeadDotProductAttention(HEADS)
        rise, fall = nn.Dense(4 * WIDTH), nn.Dense(WIDTH)
        if self.norm_first:
            x = x + attend(nn.LayerNorm()(x))
            return x + fall(nn.gelu(rise(nn.LayerNorm()(x))))
        x = nn.LayerNorm()(x + attend(x))
        return nn.LayerNorm()(x + fall(nn.gelu(rise(x))))


class Encoder(nn.Module):
    """Like BERT: positions that are learned, norms after sums, masked tokens, a tied head."""

    @nn.compact
    def loss(self, batch, *, train):
        embed = nn.Embed(VOCAB, WIDTH)
        places = self.param("places", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.LayerNorm()(embed(batch["tokens"]) + places)
        for _ in range(2):
            x = EncoderBlock(norm_first=False)(x)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(WIDTH)(x)))
        bias = self.param("bias", nn.initializers.zeros, (VOCAB,))
        losses = cross_entropy(embed.attend(x) + bias, batch["targets"])
        return (losses * batch["mask"]).sum() / batch["mask"].sum(), {}


class VisionTransformer(nn.Module):
    """Patches by a convolution, blocks with norms before products, the mean of the patches."""

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4))(batch["image"])
        x = x.reshape(x.shape[0], -1, WIDTH)
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(2):
            x = EncoderBlock(norm_first=True)(x)
        logits = nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(axis=1))
        return cross_entropy(logits, batch["label"]).mean(), {}


class UNet(nn.Module):
    """Convolutions down and up again, with skips; it predicts its image."""

    @nn.compact
    def loss(self, batch, *, train):
        def block(x, width):
            y = nn.relu(nn.GroupNorm(4)(nn.Conv(width, (3, 3))(x)))
            return nn.relu(nn.Conv(width, (1, 1))(x) + nn.Conv(width, (3, 3))(y))

        first = block(batch["image"], 8)
        x = block(nn.Conv(16, (2, 2), strides=(2, 2))(first), 16)
        x = nn.ConvTranspose(8, (2, 2), strides=(2, 2))(x)
        x = block(jnp.concatenate([first, x], axis=-1), 8)
        return jnp.square(nn.Conv(4, (1, 1))(x) - batch["image"]).mean(), {}


class StateSpace(nn.Module):
    """Gated linear recurrences along the sequence, by an associative scan and by running sums."""

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.Embed(VOCAB, WIDTH)(batch["tokens"][:, :-1])
        for _ in range(2):
            y = nn.RMSNorm()(x)
            keep, new = nn.sigmoid(nn.Dense(2 * WIDTH)(y)), nn.Dense(2 * WIDTH)(y)

            def after(a, b):
                return a[0] * b[0], a[1] * b[0] + b[1]

            state = lax.associative_scan(after, (keep, new), axis=1)[1]
            state = state + jnp.cumsum(new, axis=1) / LENGTH
            x = x + nn.Dense(WIDTH)(state * nn.silu(nn.Dense(2 * WIDTH)(y)))
        logits = nn.Dense(VOCAB)(nn.RMSNorm()(x))
        return cross_entropy(logits, batch["tokens"][:, 1:]).mean(), {}


class Series(nn.Module):
    """Predicts a series from another one: a causal convolution, running sums, products."""

    @nn.compact
    def loss(self, batch, *, train):
        x = nn.Conv(16, (3,), padding="CAUSAL")(batch["x"])
        x = nn.LayerNorm()(x + jnp.cumsum(x, axis=1) / SERIES)
        y = nn.Dense(4)(nn.gelu(nn.Dense(32)(x)))
        return jnp.square(y - batch["y"]).mean(), {}


def series(rows, seed=0):
    """Return {"x": float32[rows, SERIES, 8], "y": float32[rows, SERIES, 4]}."""
    rng = np.random.default_rng(seed)
    sizes = {"x": 8, "y": 4}
    return {k: rng.normal(size=(rows, SERIES, n)).astype(np.float32) for k, n in sizes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of models.

    Attributes:
      make: returns the model.
      batch: makes a batch of a number of rows.
    """

    make: Callable[[], Any]
    batch: Callable[[int], Any]


KINDS = {
    "encoder": Kind(make=Encoder, batch=masked),
    "vision transformer": Kind(make=VisionTransformer, batch=images),
    "U-Net": Kind(make=UNet, batch=images),
    "state space": Kind(make=StateSpace, batch=tokens),
    "Mixtral": Kind(make=Mixtral.tiny, batch=tokens),
    "Mixtral, dense": Kind(make=lambda: Mixtral.tiny(routing="dense", scan=False), batch=tokens),
}


KEY_BIAS_TOLERANCE = 2 * float(np.finfo(np.float32).eps)
"""Bound on the gradient of a key bias, as a share of the gradient of its kernel.

A key bias adds the same number to all scores of a query, and softmax ignores it. So its exact
gradient is zero, and what a computation finds is rounding alone. The test compares it with zero.
The scale is the gradient of the kernel, which sums the same cotangents without cancelling. Rounding
leaves up to 0.5 eps of that scale, on one device and on axes alike (in float64 1e-16). If the
cotangent of one position of one row is lost, at least 3e-3 is left.
"""


def assert_equals_whole(step: zeroxla.Step, make: Callable[[], Any], batch: Any) -> None:
    """Assert that a step computes the loss and the gradients that `jax.grad` computes for the whole
    model on one device."""
    state = step.init(jax.random.key(0), batch)
    loss, gradients = step.grad(state, batch)
    adapted = adapt(make())
    whole = jax.tree.map(np.asarray, zeroxla.full_params(state))
    want, expected = jax.jit(
        jax.value_and_grad(lambda p: adapted.loss(p, {}, batch, jax.random.key(1), train=True)[0])
    )(whole)
    assert abs(float(loss) / float(want) - 1) < 1e-6
    errors = relative_errors(gradients, expected)
    found, kernels = leaf_norms(gradients), leaf_norms(expected)
    for name in [*errors]:
        if name.endswith("key/bias"):
            del errors[name]
            share = found[name] / kernels[name.removesuffix("bias") + "kernel"]
            assert share <= KEY_BIAS_TOLERANCE, name
    leaf, error = worst(errors)
    assert error <= GRADIENT_TOLERANCE, leaf
