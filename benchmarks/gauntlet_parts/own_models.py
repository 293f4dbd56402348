"""Models that need no package but those of the development environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import (
    VOCABULARY,
    classification,
    cross_entropy,
    floats,
    labels,
    next_token,
    to_waves,
    tokens,
)


def direct(apply: Any, tokens: Any) -> Any:
    """Call a model that takes tokens and returns logits."""
    return apply(tokens)


class Block(nn.Module):
    """A causal block with flax's own attention, in the shape that `nn.scan` takes."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> tuple[Any, None]:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(h, h, mask=mask)
        h = nn.Dense(48)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(h)), None


class LanguageModel(nn.Module):
    """A language model of flax's attention, in a loop or layer by layer."""

    scan: bool = False
    length: int = 32

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, 32)
        x = embed(tokens) + nn.Embed(self.length, 32)(jnp.arange(tokens.shape[1]))
        if self.scan:
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = stack()(x, None)
        else:
            for _ in range(2):
                x, _ = Block()(x)
        return embed.attend(nn.LayerNorm()(x))


class RecurrentModel(nn.Module):
    """A language model of an LSTM."""

    length: int = 32

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.RNN(nn.OptimizedLSTMCell(32))(nn.Embed(VOCABULARY, 32)(tokens))
        return nn.Dense(VOCABULARY)(x)


class ConvolutionalNet(nn.Module):
    """Convolutions with BatchNorm and a skip."""

    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.Conv(8, (3, 3))(x)
        for _ in range(2):
            y = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x))
            x = x + nn.relu(y)
        return nn.Dense(5)(x.mean((1, 2)))


class Experts(nn.Module):
    """A mixture of experts: each token goes through all, weighted by a router."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        options: dict[str, Any] = {"in_axes": None, "out_axes": -2, "axis_size": 4}
        experts = nn.vmap(
            nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, **options
        )
        weights = nn.softmax(nn.Dense(4)(x))
        return nn.Dense(5)(jnp.einsum("...e,...ed->...d", weights, experts(16)(x)))


class Autoencoder(nn.Module):
    """An autoencoder with the methods encode and decode, called by the loss."""

    def setup(self) -> None:
        self.down = nn.Dense(4)
        self.up = nn.Dense(12)

    def encode(self, x: Any) -> Any:
        return nn.tanh(self.down(x))

    def decode(self, z: Any) -> Any:
        return self.up(z)

    def __call__(self, x: Any) -> Any:
        return self.decode(self.encode(x))


class Diagonal(nn.Module):
    """A state-space layer with complex poles, as parameters of two real numbers each."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        poles = self.param("poles", nn.initializers.normal(0.5), (2, 8))
        rate = jnp.exp(jax.lax.complex(-jnp.exp(poles[0]), poles[1]))
        drive = nn.Dense(8)(x).astype(jnp.complex64)

        def both(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        rates = jnp.broadcast_to(rate, drive.shape)
        _, states = jax.lax.associative_scan(both, (rates, drive), axis=1)
        return nn.Dense(4)(jnp.concatenate([states.real, states.imag], -1))


class ComplexDiagonal(nn.Module):
    """A layer with complex parameters."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(0.5, jnp.complex64), (12, 6))
        return nn.Dense(4)(jnp.abs(x @ kernel))


class NnxBlock(nnx.Module):
    """A causal block with nnx's own attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(32, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.down = nnx.Linear(48, 32, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class NnxLanguageModel(nnx.Module):
    """A language model of nnx's attention."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, 32, rngs=rngs)
        self.places = nnx.Embed(32, 32, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def language_model(model: Any) -> Built:
    batch = {"tokens": tokens(11)}
    return Built(model=model, loss=next_token(direct), batch=batch, logits=direct, context=32)


def bundled(model: Any) -> Built:
    """Return a language model of zeroxla.models, which has its own loss."""
    return Built(model=model, batch={"tokens": tokens(12, 64)}, logits=direct, context=16)


def gpt(**options: Any) -> Built:
    from zeroxla.models import GPT

    return bundled(GPT.tiny(vocab=VOCABULARY, dropout=0.0, **options))


def llama(**options: Any) -> Built:
    from zeroxla.models import Llama

    return bundled(Llama.tiny(vocab=VOCABULARY, **options))


def mlp() -> Built:
    from zeroxla.models import MLP

    model = MLP.tiny(dropout=0.0)
    return Built(model=model, batch={"image": floats(28, 28, 1), "label": labels(5)})


def alexnet() -> Built:
    from zeroxla.models import AlexNet

    model = AlexNet.tiny(dropout=0.0)
    return Built(model=model, batch={"image": floats(32, 32, 3), "label": labels(5)})


def pair_of_functions() -> Built:
    """Return plain functions over a dict of arrays, a language model of averages."""

    def init(key: jax.Array, batch: Any) -> Any:
        embed, out = jax.random.split(key)
        return {
            "embed": 0.3 * jax.random.normal(embed, (VOCABULARY, 24)),
            "out": 0.3 * jax.random.normal(out, (24, VOCABULARY)),
        }

    def logits(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens]
        count = jnp.arange(1, tokens.shape[1] + 1)[:, None]
        return jnp.tanh(jnp.cumsum(x, 1) / count) @ params["out"]

    def loss(params: Any, batch: Any, key: jax.Array) -> Any:
        row = batch["tokens"]
        return cross_entropy(logits(params, row[:, :-1]), row[:, 1:])

    return Built(
        model=(init, loss),
        batch={"tokens": tokens(11)},
        logits=logits,
        context=32,
        targets="(embed|out)$",
    )


def convolutional(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["image"], train=train)


def on_x(apply: Any, batch: Any, train: bool) -> Any:
    return apply(batch["x"])


LANGUAGE: dict[str, Callable[[], Built]] = {
    "linen attention, unrolled": lambda: language_model(LanguageModel()),
    "linen attention, scanned": lambda: language_model(LanguageModel(scan=True)),
    "linen LSTM": lambda: language_model(RecurrentModel()),
    "nnx attention": lambda: language_model(lambda rngs: NnxLanguageModel(rngs)),
    "pair of functions": pair_of_functions,
    "zeroxla GPT, scanned": lambda: gpt(layers=2),
    "zeroxla GPT, unrolled": lambda: gpt(layers=2, scan=False),
    "zeroxla Llama, scanned": lambda: llama(layers=2),
    "zeroxla Llama, unrolled": lambda: llama(layers=2, scan=False),
}

OTHER: dict[str, Callable[[], Built]] = {
    "zeroxla MLP": mlp,
    "zeroxla AlexNet": alexnet,
    "linen convolutions": lambda: Built(
        model=ConvolutionalNet(),
        loss=classification(convolutional),
        batch={"image": floats(8, 8, 3), "label": labels(5)},
    ),
    "linen experts": lambda: Built(
        model=Experts(),
        loss=classification(on_x),
        batch={"x": floats(12), "label": labels(5)},
    ),
    "linen autoencoder": lambda: Built(
        model=Autoencoder(), loss=to_waves(on_x), batch={"x": floats(12)}
    ),
    "linen state space": lambda: Built(
        model=Diagonal(), loss=to_waves(on_x), batch={"x": floats(7, 6)}
    ),
    "linen complex parameters": lambda: Built(
        model=ComplexDiagonal(), loss=to_waves(on_x), batch={"x": floats(12)}
    ),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(name=name, kind=kind, package=name.split()[0].replace("pair", "jax"), build=build)
        for kind, models in (("language model", LANGUAGE), ("other", OTHER))
        for name, build in models.items()
    ]
