"""A language model that is quick to trace and to compile: no attention."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zeroxla.models.losses import next_token_loss


class Perceptron(nn.Module):
    """A block of two products."""

    width: int
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(self.width)(jnp.tanh(nn.Dense(self.hidden)(x))), None


class Perceptrons(nn.Module):
    """The next token of each one, by blocks in a loop."""

    layers: int = 4
    width: int = 32
    hidden: int = 64
    vocab: int = 64

    @nn.compact
    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        loop = nn.scan(
            Perceptron, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
        )
        x = nn.Embed(self.vocab, self.width, name="embed")(tokens_BL)
        x, _ = loop(self.width, self.hidden, name="h")(x, None)
        return nn.Dense(self.vocab, name="head")(x)

    def loss(self, batch: Any, *, train: bool) -> Any:
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)
