"""The models of memory_budgets.py. Activations make up most of what their steps take.

Shape letters: B batch, L length, D width, H and W height and width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.models import GPT, Llama
from zeroxla.models.losses import classification_loss, next_token_loss

VOCABULARY = 256
LENGTH = 256
WIDTH = 128
LAYERS = 6
CLASSES = 10

Remat = Callable[..., Any] | None
"""A policy of `jax.checkpoint_policies` for each block; None leaves `jax.checkpoint` out."""


def with_remat(block: Any, policy: Remat) -> Any:
    """Return a module class. Give its instances names: `nn.remat` changes those that Flax makes."""
    return block if policy is None else nn.remat(block, policy=policy)


class ViT(nn.Module):
    """A vision transformer on 32 x 32 pixels: patches of 2 x 2, the mean of them at the end."""

    remat: Remat = None

    @nn.compact
    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        x_BHWD = nn.Conv(WIDTH, (2, 2), strides=2)(image_BHWC)
        x_BLD = x_BHWD.reshape(x_BHWD.shape[0], -1, WIDTH)
        x_BLD += self.param("positions", nn.initializers.normal(0.02), x_BLD.shape[1:])
        for i in range(LAYERS):
            x_BLD = with_remat(EncoderBlock, self.remat)(name=f"block_{i}")(x_BLD)
        return nn.Dense(CLASSES)(nn.LayerNorm()(x_BLD).mean(1))

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        return classification_loss(self(batch["image"]), batch["label"])


class EncoderBlock(nn.Module):
    """Attention that is written out, and a perceptron.

    Attention has no biases: the gradient of a key's bias is rounding alone.
    """

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        x_BLD += nn.MultiHeadDotProductAttention(4, use_bias=False)(nn.LayerNorm()(x_BLD))
        y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x_BLD))
        return x_BLD + nn.Dense(WIDTH)(nn.gelu(y))


class ResNet(nn.Module):
    """A residual network on 32 x 32 pixels with batch statistics: three stages of two blocks."""

    remat: Remat = None

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        x_BHWC = nn.Conv(32, (3, 3), use_bias=False)(x_BHWC)
        for stage in range(3):
            for i in range(2):
                stride = 2 if stage and not i else 1
                block = with_remat(ResidualBlock, self.remat)
                name = f"block_{stage}_{i}"
                x_BHWC = block(32 * 2**stage, stride, train=train, name=name)(x_BHWC)
        return nn.Dense(CLASSES)(x_BHWC.mean((1, 2)))

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        return classification_loss(self(batch["image"], train), batch["label"])


class ResidualBlock(nn.Module):
    features: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        def convolved(x: jax.Array, size: int, stride: int) -> jax.Array:
            x = nn.Conv(self.features, (size, size), strides=stride, use_bias=False)(x)
            return nn.BatchNorm(use_running_average=not self.train)(x)

        y = convolved(nn.relu(convolved(x_BHWC, 3, self.stride)), 3, 1)
        if self.stride > 1:
            x_BHWC = convolved(x_BHWC, 1, self.stride)
        return nn.relu(x_BHWC + y)


class StateSpace(nn.Module):
    """A language model of gated linear recurrences, computed by `associative_scan`."""

    remat: Remat = None

    @nn.compact
    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        x_BLD = nn.Embed(VOCABULARY, WIDTH)(tokens_BL)
        for i in range(4):
            x_BLD = with_remat(RecurrentBlock, self.remat)(name=f"block_{i}")(x_BLD)
        return nn.Dense(VOCABULARY)(nn.RMSNorm()(x_BLD))

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


class RecurrentBlock(nn.Module):
    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y_BLD = nn.RMSNorm()(x_BLD)
        keep_BLD = nn.sigmoid(nn.Dense(WIDTH)(y_BLD) + 2.0)
        drive_BLD = (1 - keep_BLD) * nn.Dense(WIDTH)(y_BLD)

        def both(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        _, state_BLD = lax.associative_scan(both, (keep_BLD, drive_BLD), axis=1)
        x_BLD += nn.Dense(WIDTH)(state_BLD * nn.silu(nn.Dense(WIDTH)(y_BLD)))
        y_BLD = nn.Dense(2 * WIDTH)(nn.RMSNorm()(x_BLD))
        return x_BLD + nn.Dense(WIDTH)(nn.gelu(y_BLD))


class UNet(nn.Module):
    """A U-Net that removes noise from 32 x 32 pixels: three levels, joined across."""

    remat: Remat = None

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        block = with_remat(UNetBlock, self.remat)
        x_BHWC = nn.Conv(32, (3, 3))(x_BHWC)
        across = []
        for level in range(3):
            x_BHWC = block(32 * 2**level, name=f"down_{level}")(x_BHWC)
            across.append(x_BHWC)
            x_BHWC = nn.Conv(32 * 2**level, (3, 3), strides=2)(x_BHWC)
        x_BHWC = block(128, name="middle")(x_BHWC)
        for level, skip_BHWC in reversed([*enumerate(across)]):
            x_BHWC = nn.ConvTranspose(32 * 2**level, (2, 2), strides=(2, 2))(x_BHWC)
            joined = jnp.concatenate([x_BHWC, skip_BHWC], -1)
            x_BHWC = block(32 * 2**level, name=f"up_{level}")(joined)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x_BHWC)))

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        noise = jax.random.normal(jax.random.key(0), batch["image"].shape)
        return jnp.mean(jnp.square(self(batch["image"] + noise) - noise))


class UNetBlock(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(8)(x_BHWC)))
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(8)(y)))
        return nn.Dense(self.features)(x_BHWC) + y


def gpt(*, scan: bool, layers: int = LAYERS, remat: Remat = None) -> GPT:
    shape: dict[str, Any] = {"vocab": VOCABULARY, "length": LENGTH, "width": WIDTH, "heads": 4}
    return GPT(layers=layers, scan=scan, remat=remat or False, **shape)


def llama(*, scan: bool, remat: Remat = None) -> Any:
    shape: dict[str, Any] = {"vocab": VOCABULARY, "layers": LAYERS, "width": WIDTH}
    shape |= {"heads": 4, "kv_heads": 2, "hidden": 3 * WIDTH, "remat": remat or False}
    return lambda rngs: Llama(rngs=rngs, scan=scan, **shape)


def tokens(rows: int) -> dict[str, np.ndarray]:
    shape = (rows, LENGTH + 1)
    return {"tokens": np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)}


def images(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, CLASSES, rows, np.int32)}


Case = tuple[Callable[[Remat], Any], Callable[[int], dict[str, np.ndarray]], int]
"""(policy -> the model, rows -> a batch, rows of a device)."""

CASES: dict[str, Case] = {
    "GPT, scanned": (lambda remat: gpt(scan=True, remat=remat), tokens, 8),
    "GPT, written out": (lambda remat: gpt(scan=False, remat=remat), tokens, 8),
    "Llama, scanned": (lambda remat: llama(scan=True, remat=remat), tokens, 8),
    "Llama, written out": (lambda remat: llama(scan=False, remat=remat), tokens, 8),
    "ViT": (ViT, images, 8),
    "ResNet": (ResNet, images, 32),
    "state space": (StateSpace, tokens, 8),
    "U-Net": (UNet, images, 16),
}
