"""AlexNet (flax.linen): the 22 layers that torchvision lists, in NHWC.

Shape letters: B batch, H height, W width, C channels.
Source: torchvision.models.alexnet (Krizhevsky, "One weird trick", arXiv 1404.5997).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .convolution import convolution
from .dtypes import follow_kernel
from .losses import classification_loss

MIN_SIZE = 63
"""The smallest height and width whose feature map has at least one pixel."""


class AlexNet(nn.Module):
    """Five convolutions and three dense layers, as the list `layers` of 22 modules or functions.

    Parameters: `layers_I` for I in 0, 3, 6, 8, 10 (convolutions, kernel [h, w, in, out]) and
    16, 19, 21 (dense, kernel [in, out]), each {"kernel", "bias"}. With 10 classes they have 23296,
    307392, 663936, 884992, 590080, 37752832, 16781312 and 40970 parameters.
    """

    classes: int = 10
    width: float = 1.0
    """Factor on all numbers of channels and hidden units. The product is rounded, at least 1."""
    dropout: float = 0.5
    """Dropout rate before the first two dense layers, in training only (rng stream "dropout")."""

    @classmethod
    def tiny(cls, **overrides: Any) -> "AlexNet":
        """A sixteenth of the width: 227,150 parameters with 10 classes."""
        return cls(**{"width": 1 / 16, **overrides})

    @classmethod
    def small(cls, **overrides: Any) -> "AlexNet":
        """A quarter of the width: 3,579,098 parameters with 10 classes."""
        return cls(**{"width": 1 / 4, **overrides})

    @classmethod
    def full(cls, **overrides: Any) -> "AlexNet":
        """torchvision's own widths: 57,044,810 parameters with 10 classes."""
        return cls(**overrides)

    def setup(self) -> None:
        self.layers = alexnet_layers(self.classes, width=self.width, dropout=self.dropout)

    def __call__(self, image: jax.Array, *, train: bool = False) -> jax.Array:
        """Return float logits [B, classes] for images [B, H, W, C].

        A height or width below 63 is enlarged to it.
        """
        x = at_least(image, MIN_SIZE)
        for layer in self.layers:
            x = layer(x, deterministic=not train) if isinstance(layer, nn.Dropout) else layer(x)
        return x

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (mean cross-entropy, {"accuracy"}) for "image" [B, H, W, C] and "label" int[B]."""
        return classification_loss(self(batch["image"], train=train), batch["label"])


def alexnet_layers(
    classes: int = 10, *, width: float = 1.0, dropout: float = 0.5
) -> list[nn.Module | Callable[[jax.Array], jax.Array]]:
    """Return the 22 layers in order: 13 of features, average pool, flatten, 7 of the classifier."""

    def conv(features: int, size: int, stride: int, padding: int) -> nn.Conv:
        return nn.Conv(
            max(1, round(features * width)),
            (size, size),
            strides=stride,
            padding=padding,
            promote_dtype=follow_kernel,
            conv_general_dilated=convolution,
        )

    def dense(features: int) -> nn.Dense:
        return nn.Dense(features, promote_dtype=follow_kernel)

    pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2))
    hidden = max(1, round(4096 * width))
    return [
        *(conv(64, 11, 4, 2), nn.relu, pool),
        *(conv(192, 5, 1, 2), nn.relu, pool),
        *(conv(384, 3, 1, 1), nn.relu),
        *(conv(256, 3, 1, 1), nn.relu),
        *(conv(256, 3, 1, 1), nn.relu, pool),
        *(partial(adaptive_average_pool, size=6), flatten),
        *(nn.Dropout(dropout), dense(hidden), nn.relu),
        *(nn.Dropout(dropout), dense(hidden), nn.relu),
        dense(classes),
    ]


def at_least(image_BHWC: jax.Array, size: int) -> jax.Array:
    """Enlarge a height or width that is below `size` to it (bilinear)."""
    batch, height, width, channels = image_BHWC.shape
    if min(height, width) >= size:
        return image_BHWC
    shape = (batch, max(height, size), max(width, size), channels)
    return jax.image.resize(image_BHWC, shape, "bilinear")


def adaptive_average_pool(x_BHWC: jax.Array, *, size: int) -> jax.Array:
    """Average into size x size cells; cell i spans floor(i H / size) to ceil((i + 1) H / size).

    These are the cells of PyTorch's AdaptiveAvgPool2d. They overlap if size does not divide H, and
    repeat pixels if H < size. They are computed as two products with constant matrices, [size, H]
    and [size, W].
    """
    if x_BHWC.shape[1:3] == (size, size):
        return x_BHWC

    def cells(length: int) -> jax.Array:
        weights = np.zeros((size, length))
        for i in range(size):
            first, last = i * length // size, -(-(i + 1) * length // size)
            weights[i, first:last] = 1 / (last - first)
        return jnp.asarray(weights, x_BHWC.dtype)

    return jnp.einsum("bhwc,ih,jw->bijc", x_BHWC, cells(x_BHWC.shape[1]), cells(x_BHWC.shape[2]))


def flatten(x_BHWC: jax.Array) -> jax.Array:
    """Return [B, H * W * C]."""
    return x_BHWC.reshape(x_BHWC.shape[0], -1)
