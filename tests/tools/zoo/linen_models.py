"""flax.linen modules as their users write them, without regard to sharding.

Shape letters: B batch, D width.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tools.zoo.base import case, images, mse, series, tokens, vectors
from zeroxla.models.losses import classification_loss


class Regressor(nn.Module):
    """Calls itself on x; subclasses say how."""

    def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
        return mse(self(batch["x"], train), batch["y"])


@case(images, unit_elements=100, rows=8)
def batchnorm() -> Any:
    """Convolutions with batch statistics of each device's own rows."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            for width in (4, 8):
                x = nn.Conv(width, (3, 3), strides=2, use_bias=width == 8)(x)
                x = nn.BatchNorm(use_running_average=not train)(x)
                x = nn.relu(x)
            return nn.Dense(10)(x.mean((1, 2)))

        def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
            return classification_loss(self(batch["image"], train), batch["label"])

    return Net()


class SyncedNet(Regressor):
    """Batch statistics over all devices, if the axes are given."""

    sync: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(2):
            x = nn.tanh(nn.Dense(8)(x))
            x = nn.BatchNorm(use_running_average=not train, axis_name=self.sync)(x)
        return nn.Dense(3)(x)


@case(vectors, local=SyncedNet, rows=8)
def synced_batchnorm() -> Any:
    return SyncedNet(sync=("node", "device"))


@case(vectors)
def shared_module() -> Any:
    """One dense layer called at four depths."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            shared = nn.Dense(8, name="shared")
            x = nn.Dense(8, name="first")(x)
            for i in range(4):
                x = nn.tanh(shared(x) + nn.Dense(8, use_bias=False, name=f"own_{i}")(x))
            return nn.Dense(3, name="last")(x)

    return Net()


@case(vectors)
def tied_transposed() -> Any:
    """The decoder is the encoder's kernel, transposed, and the kernel is scaled for each use."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (6, 8))
            gain = self.param("gain", nn.initializers.ones, ())
            h = nn.LayerNorm()(nn.gelu(x @ (kernel * gain)))
            return nn.Dense(3)(h @ (kernel * gain).T)

    return Net()


@case(vectors, frozen=("encoder", "scale$"), unit_elements=32)
def frozen_leaves() -> Any:
    """Frozen before, between and behind trained ones."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = nn.tanh(nn.Dense(8, name="embed")(x))
            x = nn.tanh(nn.Dense(8, name="encoder")(x))
            return nn.Dense(3, name="head")(nn.LayerNorm(name="norm")(x))

    return Net()


@case(series, unit_elements=200, heavy=True)
def recurrent() -> Any:
    """An LSTM over time: its leaves are constants of the scan."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            h = nn.RNN(nn.OptimizedLSTMCell(8), name="forward")(x)
            h = nn.RNN(nn.GRUCell(8), reverse=True, keep_order=True, name="back")(h)
            return nn.Dense(3)(h[:, -1])

    return Net()


@case(vectors)
def learned_carry() -> Any:
    """A scan over stacked layers whose first carry is a leaf."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = nn.tanh(nn.Dense(8)(carry) + nn.Dense(8, use_bias=False)(x))
            return carry, carry.mean(-1)

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            start = self.param("start", nn.initializers.normal(1.0), (8,))
            layers = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=3,
            )
            carry, means = layers()(jnp.broadcast_to(start, (len(x), 8)), x)
            return nn.Dense(3)(carry) + means.T

    return Net()


@case(vectors)
def ensemble() -> Any:
    """Five copies of a network under nn.vmap."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            member = nn.vmap(
                nn.Dense,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=5,
            )
            return nn.Dense(3)(nn.tanh(member(7)(x)).mean(0))

    return Net()


class NormedBlock(nn.Module):
    """x + dropout(norm(dense(x))). `Block` in nnx_models.py says why there is no bias."""

    width: int
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        y = nn.Dense(self.width, use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not self.train)(y)
        return x + nn.Dropout(0.2, deterministic=not self.train)(nn.tanh(y)), None


def stack(block: Any, axis: int = 0, **options: Any) -> Any:
    """Return nn.scan of three blocks with leaves stacked along `axis`."""
    return nn.scan(
        block,
        variable_axes={"params": axis, "batch_stats": 0},
        split_rngs={"params": True, "dropout": True},
        length=3,
        **options,
    )


@case(vectors, rows=8)
def scan_with_state() -> Any:
    """Stacked layers with stacked batch statistics and dropout."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x, _ = stack(NormedBlock)(width=6, train=train)(x, None)
            return nn.Dense(3)(x)

    return Net()


@case(vectors)
def scan_axis_1() -> Any:
    """Leaves stacked along their second dim; one norm outside shares nothing with the loop."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return nn.tanh(nn.Dense(6, use_bias=False)(x)) + x, None

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x, _ = stack(Block, axis=1)()(x, None)
            return nn.Dense(3)(nn.LayerNorm()(x))

    return Net()


@case(vectors, rows=8, heavy=True)
def remat_of_scan() -> Any:
    """nn.remat around nn.scan: the loop is inside the checkpoint."""

    class Stack(nn.Module):
        train: bool

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return stack(NormedBlock)(width=6, train=self.train)(nn.Dense(6)(x), None)[0]

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return nn.Dense(3)(nn.remat(Stack)(train)(x))

    return Net()


@case(vectors, unit_elements=100, heavy=True)
def wide_remat() -> Any:
    """One nn.remat around several layers, more than a unit, and one with a policy."""

    class Body(nn.Module):
        width: int = 6

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(10)(x)))
            return x

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = nn.remat(Body)()(x)
            x = nn.remat(Body, policy=jax.checkpoint_policies.dots_saveable)()(x)
            return nn.Dense(3)(x)

    return Net()


@case(series, unit_elements=100, heavy=True)
def encoder_decoder() -> Any:
    """Stacked decoder layers attend to the encoder's result, a constant of their loop."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, memory: jax.Array) -> tuple[jax.Array, None]:
            small = nn.initializers.normal(0.05)
            attend = nn.MultiHeadDotProductAttention(2, qkv_features=8, kernel_init=small)
            return x + attend(nn.LayerNorm()(x), memory), None

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            memory = nn.gelu(nn.Dense(10)(x))
            x, _ = stack(Layer, in_axes=nn.broadcast)()(nn.Dense(8)(x), memory)
            return nn.Dense(3)(x.mean(1))

    return Net()


@case(vectors)
def normalised_weights() -> Any:
    """Spectral and weight normalisation: the loss reads functions of leaves, and state follows
    from leaves alone."""

    class Net(Regressor):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = nn.tanh(nn.SpectralNorm(nn.Dense(8))(x, update_stats=train))
            return nn.WeightNorm(nn.Dense(3))(x)

    return Net()


@case(vectors)
def branches() -> Any:
    """nn.cond and nn.switch over submodules, chosen by the data."""

    class Net(Regressor):
        def setup(self) -> None:
            self.first, self.second = nn.Dense(6), nn.Dense(6)
            self.last = [nn.Dense(3) for _ in range(2)]

        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            if self.is_initializing():  # One branch alone would not make the other's leaves.
                return self.last[0](self.first(x)) + self.last[1](self.second(x))
            left, right = lambda m, x: m.first(x), lambda m, x: nn.tanh(m.second(x))
            x = nn.cond(x.sum() > 0, left, right, self, x)
            last = [lambda m, x, i=i: m.last[i](x) for i in range(2)]
            return nn.switch((x.mean() > 0).astype(int), last, self, x)

    return Net()


@case(tokens, unit_elements=500)
def tied_embedding() -> Any:
    """Embedding, positions, attention, and `attend` with the same table at the end."""

    class Net(nn.Module):
        @nn.compact
        def loss(self, batch: dict[str, jax.Array], *, train: bool) -> Any:
            tokens = batch["tokens"]
            embed = nn.Embed(64, 8)
            x = embed(tokens[:, :-1]) + self.param("place", nn.initializers.normal(0.1), (7, 8))
            mask = nn.make_causal_mask(tokens[:, :-1])
            small = nn.initializers.normal(0.05)
            attend = nn.MultiHeadDotProductAttention(2, kernel_init=small)
            x = x + attend(nn.LayerNorm()(x), mask=mask)
            logp = nn.log_softmax(embed.attend(x))
            return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

    return Net()
