"""One row of the pipelines' equality matrix: a model on a mesh, against the whole model on one
device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zeroxla
from tools import cut_models
from tools.equality import relative
from tools.reference import relative_errors, remember_gradients, worst
from zeroxla import Pipeline, TiedLayer, ZeroConfig
from zeroxla.models import GPT, Llama
from zeroxla.models.alexnet import alexnet_layers
from zeroxla.models.gpt_layers import Block, layer_norm
from zeroxla.models.losses import classification_loss, next_token_loss

KEY = jax.random.key(4)
ROWS = 96  # of the batch: divides by every number of micro-batches on every mesh
PIPES = (1, 2, 4)
SHARES = ((1, 1), (1, 2), (2, 1), (2, 2))  # nodes and devices of a stage
MICRO_BATCHES = (1, 2, 3, 4, 8)
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "1f1b, low": {"schedule": "1f1b", "memory": "low"},
    "gpipe": {"schedule": "gpipe"},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved"},
    "zb-v": {"schedule": "zb-v", "stash": "activations"},
    "1f1b, activations": {"schedule": "1f1b", "stash": "activations"},
    "dualpipev": {"schedule": "dualpipev"},
}
CHUNKED = ("interleaved", "zb-v", "dualpipev")  # two stages of each rank
SMALL: dict[str, Any] = {"persistence_threshold": 0, "quantize_threshold": 600}
PRESETS: dict[str, tuple[str, ZeroConfig]] = {
    "step": ("step", ZeroConfig.zero3(**SMALL)),
    "tick": ("tick", ZeroConfig.zero3(**SMALL)),
    "zeropp, step": ("step", ZeroConfig.zeropp(**SMALL)),
    "zeropp_hq, tick": ("tick", ZeroConfig.zeropp_hq(**SMALL)),
    "zeropp_min, tick": ("tick", ZeroConfig.zeropp_min(**SMALL)),
}


def tokens(rows: int) -> dict[str, np.ndarray]:
    """Rows of 12 tokens and their next ones."""
    return {"tokens": np.random.default_rng(rows).integers(0, 64, (rows, 13), dtype=np.int32)}


def images(rows: int) -> dict[str, np.ndarray]:
    """The smallest images that AlexNet takes."""
    rng = np.random.default_rng(rows)
    image = rng.normal(size=(rows, 63, 63, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 10, rows)}


def of_tokens(batch: Any) -> jax.Array:
    """Return the input of a language model's first layer."""
    return batch["tokens"][:, :-1]


def listed(**options: Any) -> Pipeline:
    """Return a language model of tied and untied layers. The arrays between its layers have
    different shapes, and one layer returns a tuple that the next one takes."""
    embed = nn.Embed(64, 20)

    def two(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, jnp.tanh(x[..., :7])

    def join(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x, y], axis=-1)

    layers = [
        TiedLayer("embed", embed),
        nn.Dense(33),
        nn.gelu,
        lambda rngs: nnx.Linear(33, 20, rngs=rngs),
        two,
        join,
        nn.Dense(20, use_bias=False),
        TiedLayer("embed", embed, forward=lambda module, x: module.attend(x)),
    ]
    return Pipeline(layers, next_token_loss, inputs=of_tokens, **options)


class Embeddings(nn.Module):
    """The two tables of a GPT. The head reads the first one."""

    def setup(self) -> None:
        self.wte, self.wpe = nn.Embed(64, 32), nn.Embed(32, 32)

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        return self.wte(tokens_BL) + self.wpe(jnp.arange(tokens_BL.shape[1]))

    def attend(self, x_BLD: jax.Array) -> jax.Array:
        return self.wte.attend(x_BLD)


class ListedBlock(nn.Module):
    """A block of GPT as a layer."""

    @nn.compact
    def __call__(self, x_BLD: jax.Array, train: bool) -> jax.Array:
        block = Block(heads=4, hidden=128, layers=2, dropout=0.0, train=train)
        return block(x_BLD)[0]


def gpt_listed(**options: Any) -> Pipeline:
    """Return GPT as a list of layers."""
    embed = Embeddings()
    layers = [
        TiedLayer("embed", embed),
        *(ListedBlock() for _ in range(2)),
        layer_norm("ln_f"),
        TiedLayer("embed", embed, forward=lambda module, x: module.attend(x)),
    ]
    return Pipeline(layers, next_token_loss, inputs=of_tokens, **options)


def alexnet(**options: Any) -> Pipeline:
    """Return AlexNet with a sixteenth of its width."""
    return Pipeline(
        alexnet_layers(width=1 / 16, dropout=0.0),
        lambda logits, batch: classification_loss(logits, batch["label"]),
        inputs=lambda batch: batch["image"],
        **options,
    )


MODELS: dict[str, tuple[Callable[..., Pipeline], Callable[[int], Any]]] = {
    "ties": (lambda **options: listed(partition="uniform", **options), tokens),
    "gpt, scanned": (
        lambda **options: Pipeline.from_model(GPT.tiny(layers=5), **options),
        tokens,
    ),
    "gpt, listed": (gpt_listed, tokens),
    "gpt, unrolled": (
        lambda **options: Pipeline.from_model(GPT.tiny(layers=5, scan=False), **options),
        tokens,
    ),
    "unet": (
        lambda **options: Pipeline.from_model(cut_models.UNet(), **options),
        cut_models.pictures,
    ),
    "llama": (lambda **options: Pipeline.from_model(Llama.tiny(layers=4), **options), tokens),
    "alexnet": (alexnet, images),
}


SHORT = ("gpt, listed", "llama", "unet")  # fewer than 8 layers


@dataclasses.dataclass(frozen=True)
class Row:
    """A model on a mesh."""

    model: str
    pipe: int
    share: tuple[int, int]
    microbatches: int
    schedule: str
    preset: str

    def __str__(self) -> str:
        nodes, devices = self.share
        mesh = f"{self.pipe}x{nodes}x{devices}"
        return f"{self.model}-{mesh}-{self.microbatches}-{self.schedule}-{self.preset}"

    @property
    def pairs(self) -> set[tuple[Any, Any]]:
        """The pairs of two settings with their values that occur in the row."""
        return set(itertools.combinations(dataclasses.asdict(self).items(), 2))


def matrix() -> list[Row]:
    """Return every row of at most 8 devices.

    Rows without stages have one schedule only. With two stages of each of 4 ranks, models have at
    least 8 layers; DualPipeV has two micro-batches for each rank.
    """
    rows = itertools.starmap(
        Row, itertools.product(MODELS, PIPES, SHARES, MICRO_BATCHES, SCHEDULES, PRESETS)
    )
    return [
        row
        for row in rows
        if row.pipe * row.share[0] * row.share[1] <= 8
        and (row.pipe > 1 or (row.schedule == "1f1b" and "step" in row.preset))
        and (row.pipe < 4 or row.schedule not in CHUNKED or row.model not in SHORT)
        and (row.schedule != "dualpipev" or row.microbatches >= 2 * row.pipe)
    ]


def cover() -> Iterator[Row]:
    """Yield rows in which every pair of settings occurs that occurs in the matrix.

    Each row is the one that brings most pairs not met yet. Of several such rows, the one that
    compiles fastest is taken. `zeropp_hq` is left to the matrix, as `zeropp_min` has its formats.
    """
    cheap = sorted(matrix(), key=lambda row: (row.preset.startswith("zeropp"), row.pipe))
    rest = [(row, row.pairs) for row in cheap if row.preset != "zeropp_hq, tick"]
    open_pairs = set().union(*(pairs for _, pairs in rest))
    while open_pairs:
        row, pairs = max(rest, key=lambda r: len(r[1] & open_pairs))
        open_pairs -= pairs
        yield row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative differences from the whole model. `gradient` is the worst leaf with its error."""

    loss: float
    gradient: tuple[str, float]
    norm: float


def measure(row: Row) -> Errors:
    """Take a step and compare it with the whole model under `jax.grad`."""
    make, batch_of = MODELS[row.model]
    weights, config = PRESETS[row.preset]
    nodes, devices = row.share
    with warnings.catch_warnings():
        # A preset may have options for a hop that a small mesh has not, and for leaves that are
        # gathered more than once.
        warnings.filterwarnings("ignore", message="without effect on the mesh")
        warnings.filterwarnings("ignore", message="hpz_size has no effect in a pipeline")
        step = zeroxla.make_step(
            make(**SCHEDULES[row.schedule]),
            zeroxla.make_mesh(pipe=row.pipe, nodes=nodes, devices_per_node=devices),
            optax.chain(remember_gradients(), optax.sgd(0.1)),
            config=config,
            microbatches=row.microbatches,
            weights=weights,
        )
    batch = batch_of(ROWS)
    state, metrics = step(step.init(KEY, batch), batch)
    loss, gradients = whole(row.model)
    found = [
        np.asarray(g)[tuple(map(slice, w.shape))]
        for g, w in zip(
            jax.tree.leaves(state.opt_state[0]), jax.tree.leaves(gradients), strict=True
        )
    ]
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
    return Errors(
        loss=relative(metrics["loss"], loss),
        gradient=worst(relative_errors(found, gradients)),
        norm=relative(metrics["grad_norm"], norm),
    )


@functools.cache
def whole(model: str) -> tuple[float, Any]:
    """Return loss and gradients of the whole model on one device, at the parameters with which a
    step begins."""
    make, batch_of = MODELS[model]
    adapted, batch = make().adapted, batch_of(ROWS)

    def loss(params: Any) -> jax.Array:
        return adapted.loss(params, {}, batch, KEY, train=True)[0]

    params, _ = jax.jit(adapted.init)(KEY, jax.tree.map(lambda x: x[:1], batch))
    found, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return float(found), jax.tree.map(np.asarray, gradients)
