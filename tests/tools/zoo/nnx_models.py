"""flax.nnx modules as their users write them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tools.zoo.base import case, mse, vectors


class Regressor(nnx.Module):
    """Calls itself on x; subclasses say how."""

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        return mse(self(batch["x"]), batch["y"])


class Block(nnx.Module):
    """x + dropout(norm(linear(x))).

    A bias just before the norm would have a gradient of zero, so that either side would compute
    rounding: some 1e-8 of all gradients, more than the bound. `batchnorm` has such biases.
    """

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(jnp.tanh(self.norm(self.linear(x))))


class Unrolled(Regressor):
    """Two blocks in a list; a leaf held twice; a leaf that nothing reads; a table that is data."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(6, rngs), Block(6, rngs)])
        self.scale = nnx.Param(jnp.ones(6))
        self.tied = self.scale
        self.unused = nnx.Param(jnp.ones((5, 7)))
        self.table = jnp.arange(6.0)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * self.scale + self.table
        for block in self.blocks:
            x = block(x) * self.tied
        return self.head(x)


@case(vectors, rows=8)
def nnx_batchnorm() -> Any:
    return lambda rngs: Unrolled(rngs)


class Scanned(Regressor):
    """Blocks with batch statistics and dropout, stacked and run by nnx.scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.vmap(lambda r: Block(6, r))(rngs.split(3))
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


@case(vectors, rows=8)
def nnx_scan_with_state() -> Any:
    return lambda rngs: Scanned(rngs)


class LowRank(Regressor):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        # Both factors away from zero, or half of the gradients would be zero.
        self.layer.lora.lora_b[...] = 0.3 * jax.random.normal(rngs.params(), (2, 8))
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.layer(x)))


@case(vectors, frozen=("layer/(kernel|bias)",))
def nnx_low_rank() -> Any:
    return lambda rngs: LowRank(rngs)


class Plain(nnx.Module):
    """No loss of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(6, 5, rngs=rngs)
        self.outer = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jnp.sin(self.inner(x)))


def twice(apply: Any, batch: dict[str, jax.Array], *, train: bool) -> Any:
    """A loss that calls the model on the data and on its negative."""
    y = apply(batch["x"]) - 0.5 * apply(-batch["x"])
    return mse(y, batch["y"]), {"mean": y.mean(), "positive": (y > 0).sum()}


@case(vectors, loss=twice, unit_elements=20)
def nnx_loss_function() -> Any:
    return lambda rngs: Plain(rngs)
