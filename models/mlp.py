"""A multilayer perceptron for small images (flax.linen).

Shape letters: B batch, D features, C classes.
"""

from typing import Any

import flax.linen as nn
import jax

from .dtypes import follow_kernel
from .losses import classification_loss


class MLP(nn.Module):
    """Dense layers with ReLU and dropout between them, then a dense head.

    Parameters: `dense_0` ... and `head`, each {"kernel" [in, out], "bias" [out]}.
    """

    widths: tuple[int, ...] = (512, 512)
    """Width of each hidden layer."""
    classes: int = 10
    dropout: float = 0.0
    """Dropout rate after each hidden layer, in training only (rng stream "dropout")."""

    @classmethod
    def tiny(cls, **overrides: Any) -> "MLP":
        """Two hidden layers of 32: 26,506 parameters on 28 x 28 x 1 images."""
        return cls(**{"widths": (32, 32), **overrides})

    @classmethod
    def small(cls, **overrides: Any) -> "MLP":
        """Two hidden layers of 512: 669,706 parameters on 28 x 28 x 1 images."""
        return cls(**overrides)

    @nn.compact
    def __call__(self, image: jax.Array, *, train: bool = False) -> jax.Array:
        """Return float logits [B, C] for images [B, ...]. All dims but the first are flattened."""
        x_BD = image.reshape(image.shape[0], -1)
        for i, width in enumerate(self.widths):
            x_BD = nn.relu(nn.Dense(width, promote_dtype=follow_kernel, name=f"dense_{i}")(x_BD))
            x_BD = nn.Dropout(self.dropout, deterministic=not train)(x_BD)
        return nn.Dense(self.classes, promote_dtype=follow_kernel, name="head")(x_BD)

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (mean cross-entropy, {"accuracy"}) for {"image": [B, ...], "label": int[B]}."""
        return classification_loss(self(batch["image"], train=train), batch["label"])
