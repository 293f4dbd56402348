"""Small models with one fault each, which `zeroxla.check` must find, and healthy ones."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH = 16
ROWS = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": ROWS, "y": np.sum(ROWS, 1, keepdims=True)}


def squares(prediction, batch):
    return jnp.mean((prediction - batch["y"]) ** 2)


class Convolutions(nn.Module):
    """Convolutions with batch statistics, of all devices if the norm is given an axis name."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3,), use_bias=False)(x[..., None])
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis)(x)
        x = nn.relu(x).reshape(x.shape[0], -1)
        return nn.Dense(1)(x)

    def loss(self, batch, *, train):
        return squares(self(batch["x"], train), batch)


class Perceptron(nnx.Module):
    """Two layers with dropout between them."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def loss(self, batch, *, train):
        hidden = self.drop(nnx.relu(self.first(batch["x"])), deterministic=not train)
        return squares(self.last(hidden), batch)


def init(key, batch):
    w, v = jax.random.split(key)
    return {
        "w": jax.random.normal(w, (WIDTH, WIDTH)) / WIDTH**0.5,
        "v": jax.random.normal(v, (WIDTH, 1)) / WIDTH**0.5,
    }


def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"]


def healthy(params, batch, key):
    return squares(predict(params, batch), batch)


def half(params, batch, key):
    """A model that computes in bfloat16 whatever its leaves are. It drops numbers at random, and
    its rows have weights."""
    kept = 2 * batch["x"] * jax.random.bernoulli(key, 0.5, batch["x"].shape)
    params, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, kept))
    errors = (predict(params, {"x": x}).astype(jnp.float32) - batch["y"]) ** 2
    weights = jnp.where(batch["x"][:, :1] > 0, 9.0, 1.0)
    return jnp.sum(errors * weights) / jnp.sum(weights), {"weight": jnp.sum(weights)}


def summed(params, batch, key):
    """A loss that grows with the number of rows."""
    return jnp.sum((predict(params, batch) - batch["y"]) ** 2)


def contrastive(params, batch, key):
    """Each row is told apart from the other rows of its device."""
    features = batch["x"] @ params["w"]
    scores = features @ features.T
    return jnp.mean(jax.nn.logsumexp(scores, 1) - jnp.diag(scores)) + healthy(params, batch, key)


def masked(params, batch, key):
    """A mean over the items that count, whose number differs between devices."""
    counts = batch["x"][:, :1] > 0
    errors = (predict(params, batch) - batch["y"]) ** 2
    return jnp.sum(errors * counts) / jnp.sum(counts)


def slightly_masked(params, batch, key):
    """A fault that changes gradients by less than a hundredth."""
    return 0.99 * healthy(params, batch, key) + 0.01 * masked(params, batch, key)


def weighed(params, batch, key):
    """The same mean with its weight, and the first leaf once more at the end; and a branch that
    exchanges values with other nodes, where there is one node."""
    counts = batch["x"][:, :1] > 0
    x = batch["x"].sum()
    seen = jax.lax.cond(x > 0, lambda x: jax.lax.pmean(x, "node"), lambda x: x, x)
    loss = masked(params, batch, key) + 0 * jax.lax.stop_gradient(seen)
    loss += 1e-3 * jnp.sum(params["w"] ** 2)
    return loss, {"weight": jnp.sum(counts).astype(jnp.float32)}


def parting(params, batch, key):
    """Devices whose rows have a large sum take the mean over devices, and others do not."""
    x = predict(params, batch).mean()
    seen = jax.lax.cond(batch["x"].sum() > 0, lambda x: jax.lax.pmean(x, "device"), lambda x: x, x)
    return healthy(params, batch, key) + jax.lax.stop_gradient(seen)


def endless(params, batch, key):
    """Each device loops until its own rows are small."""

    def turn(x):
        return 0.5 * jax.lax.pmean(x, ("node", "device")) + 0.1 * x

    seen = jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, turn, batch["x"][:, 0])
    return healthy(params, batch, key) + seen.mean()


@jax.custom_vjp
def product(x, w):
    """A product with a derivative of its own, of one large leaf."""
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda given, ct: (ct @ given[1].T, given[0].T @ ct))


def agreed(params, batch, key):
    """All devices decide alike, so that they may exchange something in a branch; and one large leaf
    has a rule of its own."""
    largest = jax.lax.pmax(batch["x"].max(), ("node", "device"))
    seen = jax.lax.cond(
        largest > 0, lambda x: jax.lax.pmean(x, ("node", "device")), lambda x: x, largest
    )
    return squares(jnp.tanh(product(batch["x"], params["w"])) @ params["v"], batch) + 0 * seen


LAYERS = 6


def init_stacked(key, batch):
    params = init(key, batch)
    return {**params, "layers": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5}


def indexed(params, batch, key):
    """Stacked layers, read by Python's own loop."""
    x = batch["x"]
    for i in range(LAYERS):
        x = jnp.tanh(x @ params["layers"][i])
    return healthy(params, {**batch, "x": x}, key)


def scanned(params, batch, key):
    """The same layers in a `scan`."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return healthy(params, {**batch, "x": x}, key)


def counted(params, batch, key):
    """The same layers in a loop that indexes them by its counter."""

    def layer(i, x):
        return jnp.tanh(x @ params["layers"][i])

    x = jax.lax.fori_loop(0, LAYERS, layer, batch["x"])
    return healthy(params, {**batch, "x": x}, key)


def init_places(key, batch):
    return {**init(key, batch), "places": jnp.ones((512,))}


def every_place(params, batch, key):
    """A loop slices the only dim of a leaf."""
    x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(p * x), None), batch["x"], params["places"])
    return healthy(params, {**batch, "x": x}, key)


def attention(params, batch, key):
    """Scores without a scale, of large queries and keys."""
    x = 40 * batch["x"][:, :, None] * params["w"]
    scores = jnp.einsum("bqd,bkd->bqk", x, 10 * x)
    weights = jax.nn.softmax(scores)
    return healthy(params, batch, key) + jnp.mean(weights @ x)


def masked_by_adding(params, batch, key):
    """A mask that is infinite in float16."""
    scores = predict(params, batch) * jnp.ones((1, WIDTH), batch["x"].dtype)
    mask = (batch["x"] > 0).astype(scores.dtype)
    return healthy(params, batch, key) + jax.nn.softmax(scores + (1 - mask) * -1e9).mean()


def faint(params, batch, key):
    """A gradient too small for float16."""
    small = 1e-5 * (1e-5 * (1e-5 * params["u"]))
    return healthy(params, batch, key) + jnp.mean(small * batch["x"])


def init_faint(key, batch):
    return {**init(key, batch), "u": jnp.ones((WIDTH,))}


def transformed(params, batch, key):
    """A Fourier transform, which float16 has not."""
    x = jnp.abs(jnp.fft.rfft(batch["x"] @ params["w"]))
    return healthy(params, batch, key) + jnp.mean(x)


def growing(params, batch, key):
    """Each turn of a loop makes values larger."""

    def turn(x, _):
        return 8 * x, None

    x, _ = jax.lax.scan(turn, batch["x"] @ params["w"], length=6)
    return healthy(params, batch, key) + jnp.mean(jnp.tanh(x))


def infinite(params, batch, key):
    """A loss that is infinite from the start."""
    return healthy(params, batch, key) / jnp.sum(0 * batch["x"])


def ruled(params, batch, key):
    """A derivative of the model's own over all leaves."""

    model = jax.custom_vjp(predict)
    model.defvjp(
        lambda params, batch: (predict(params, batch), (params, batch)),
        lambda given, ct: (
            *jax.vjp(predict, *given)[1](ct)[:1],
            jax.tree.map(jnp.zeros_like, batch),
        ),
    )
    return squares(model(params, batch), batch)


TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(64, WIDTH)), jnp.float32)


def with_table(params, batch, key):
    """A large array that is no parameter."""
    nearest = jnp.max(batch["x"] @ TABLE.T, 1, keepdims=True)
    return healthy(params, {**batch, "x": batch["x"] + nearest}, key)


def drawn(params, batch, key):
    """NumPy draws the noise while the loss is traced."""
    noise = np.random.default_rng().normal(size=(1, WIDTH)).astype(np.float32)
    return healthy(params, {**batch, "x": batch["x"] + noise}, key)


_calls = itertools.count()


def remembering(params, batch, key):
    """Python code that answers otherwise each time."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    scale = jax.pure_callback(lambda: np.float32(1 + next(_calls)), shape)
    return scale * healthy(params, batch, key)


def called(params, batch, key):
    """Python code without a memory."""
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    scale = jax.pure_callback(lambda: np.float32(2), shape)
    return scale * healthy(params, batch, key)
