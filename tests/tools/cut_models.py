"""Small models that nobody wrote for a pipeline, in the ways in which models are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.models import GPT

WIDTH = 8


def vectors(rows: int) -> dict[str, np.ndarray]:
    """Rows of 6 vectors and their targets."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6, WIDTH)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(rows, 6)).astype(np.float32)}


def pictures(rows: int) -> dict[str, np.ndarray]:
    """Rows of 8 x 8 pictures and their targets."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 8, 8, 3)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(rows, 8, 8)).astype(np.float32)}


def tokens(rows: int) -> dict[str, np.ndarray]:
    """Rows of 12 tokens and their next ones."""
    return {"tokens": np.random.default_rng(rows).integers(0, 64, (rows, 13), dtype=np.int32)}


class Fitted(nn.Module):
    """A model that is trained on targets."""

    def loss(self, batch: Any, *, train: bool) -> Any:
        y = self(batch["x"], train)
        return jnp.mean((y[..., 0] - batch["y"]) ** 2), {"size": jnp.mean(jnp.abs(y))}


class Residual(nn.Module):
    """Two products with a norm, and dropout if it is trained."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        y = nn.Dense(WIDTH)(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class Unrolled(Fitted):
    """Blocks that are called one after another."""

    blocks: int = 5
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(WIDTH, name="first")(x)
        block = nn.remat(Residual, static_argnums=2) if self.remat else Residual
        for i in range(self.blocks):
            x = block(self.dropout, name=f"block_{i}")(x, train)
        return nn.Dense(1, name="last")(x)


class AllStates(Fitted):
    """Blocks whose results are all read at the end, with a weight for each."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x, states = nn.Dense(WIDTH)(x), []
        for _ in range(4):
            x = Residual()(x, train)
            states.append(x)
        weights = self.param("weights", nn.initializers.normal(1.0), (4,))
        mixed = sum(w * s for w, s in zip(weights, states, strict=True))
        return nn.Dense(1)(mixed)


class UNet(Fitted):
    """Convolutions down and up again, with a connection over every level."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        skips = []
        for i in range(2):
            x = nn.relu(nn.Conv(4 * (i + 1), (3, 3), name=f"down_{i}")(x))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(12, (3, 3), name="middle")(x))
        for i, skip in reversed(list(enumerate(skips))):
            x = jax.image.resize(x, (*skip.shape[:-1], x.shape[-1]), "nearest")
            both = jnp.concatenate([x, skip], -1)
            x = nn.relu(nn.Conv(4 * (i + 1), (3, 3), name=f"up_{i}")(both))
        return nn.Dense(1, name="head")(x)


class EncoderDecoder(Fitted):
    """Two stacks; each block of the second reads the result of the first."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        code = nn.Dense(WIDTH, name="in")(x)
        for i in range(3):
            code = Residual(name=f"encoder_{i}")(code, train)
        y = nn.Dense(WIDTH, name="out")(jnp.flip(x, 1))
        for i in range(3):
            attended = jax.nn.softmax(y @ code.mT) @ code
            y = y + nn.Dense(WIDTH, name=f"cross_{i}")(attended)
            y = Residual(name=f"decoder_{i}")(y, train)
        return nn.Dense(1, name="head")(y)


class Scanned(Fitted):
    """Blocks in a loop, which may run in reverse, and whose results may all be read later."""

    reverse: bool = False
    reads_all: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def body(block: nn.Module, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = block(x, train)
            return x, jnp.tanh(x)

        x = nn.Dense(WIDTH, name="first")(x)
        loop = nn.scan(
            lambda block, x, _: body(block, x),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=4,
            reverse=self.reverse,
        )
        x, ys = loop(Residual(name="blocks"), x, None)
        if self.reads_all:
            x = x + jnp.einsum("b,b...->...", jnp.arange(1.0, 5.0), ys)
        return nn.Dense(1, name="last")(x)


class NormedBlock(nn.Module):
    """A convolution with a batch norm."""

    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        strides = (self.strides, self.strides)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.8)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A small residual network with batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(4, (3, 3), use_bias=False, name="stem")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="stem_norm")(x))
        for features, strides, count in ((4, 1, 3), (8, 2, 3)):
            for i in range(count):
                x = NormedBlock(features, strides if i == 0 else 1)(x, train)
        return nn.Dense(1, name="head")(x)

    def loss(self, batch: Any, *, train: bool) -> Any:
        y = self(batch["x"], train)
        return jnp.mean((jnp.mean(y, (1, 2, 3)) - batch["y"].mean((1, 2))) ** 2), {}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "unrolled": (Unrolled, vectors),
    "unrolled, remat": (lambda: Unrolled(remat=True), vectors),
    "unrolled, dropout": (lambda: Unrolled(blocks=3, dropout=0.3), vectors),
    "all states": (AllStates, vectors),
    "unet": (UNet, pictures),
    "encoder-decoder": (EncoderDecoder, vectors),
    "scanned": (Scanned, vectors),
    "scanned, reverse": (lambda: Scanned(reverse=True), vectors),
    "scanned, all read": (lambda: Scanned(reads_all=True), vectors),
    "scanned, reverse, all read": (lambda: Scanned(reverse=True, reads_all=True), vectors),
    "resnet": (ResNet, pictures),
    "gpt, unrolled": (lambda: GPT.tiny(layers=4, scan=False), tokens),
    "gpt, unrolled, untied": (
        lambda: GPT.tiny(layers=3, scan=False, tie=False, dropout=0.1),
        tokens,
    ),
}
