"""Models written for the gauntlet in the style of public code, with operations that are rare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import VOCABULARY, distance, floats, to_waves
from gauntlet_parts.own_models import language_model, on_x

WIDTH = 32


class SortedExperts(nn.Module):
    """Experts by a sort of tokens and `ragged_dot`, as in MaxText, Tunix and MegaBlocks."""

    experts: int = 4
    top_k: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
        scores = nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(rows))
        weights, chosen = jax.lax.top_k(scores, self.top_k)
        weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, 2 * width))
        down = self.param("down", init, (self.experts, 2 * width, width))
        hidden = nn.silu(jax.lax.ragged_dot(rows[order // self.top_k], up, sizes))
        out = jax.lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]
        out = out.reshape(-1, self.top_k, width) * weights[..., None]
        return out.sum(1).reshape(x.shape)


def turned(x: Any) -> Any:
    """Rotate pairs of features by angles that grow with positions: [B, L, ..., D]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    sin, cos, a, b = jnp.sin(angles), jnp.cos(angles), x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class LatentAttention(nn.Module):
    """DeepSeek's attention: keys and values of a latent, and a key of positions apart."""

    heads: int = 2
    width: int = 8
    turned: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        length = x.shape[1]
        latent = nn.RMSNorm()(nn.Dense(16, use_bias=False)(x))
        queries = nn.DenseGeneral((self.heads, self.width + self.turned), use_bias=False)(latent)
        both = nn.Dense(12 + self.turned, use_bias=False)(x)
        latent, key = nn.RMSNorm()(both[..., :12]), turned(both[..., 12:])
        keys_values = nn.DenseGeneral((self.heads, 2 * self.width), use_bias=False)(latent)
        plain, of_places = queries[..., : self.width], turned(queries[..., self.width :])
        scores = jnp.einsum("bqhd,bkhd->bhqk", plain, keys_values[..., : self.width])
        scores += jnp.einsum("bqhd,bkd->bhqk", of_places, key)
        seen = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(seen, scores / (self.width + self.turned) ** 0.5, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), keys_values[..., self.width :])
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False)(mixed)


class BalancedExperts(nn.Module):
    """DeepSeek's experts: sigmoid scores, one shared expert, and a bias for their choice that no
    gradient changes."""

    experts: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, hidden = x.shape[-1], 12
        scores = nn.sigmoid(nn.Dense(self.experts, use_bias=False)(x))
        bias = self.variable("router", "bias", jnp.zeros, (self.experts,))
        _, chosen = jax.lax.top_k(scores + bias.value, 2)
        taken = jax.nn.one_hot(chosen, self.experts).sum(-2)
        if self.is_mutable_collection("router") and not self.is_initializing():
            bias.value += 0.001 * jnp.sign(taken.mean() - taken.mean((0, 1)))
        weights = scores * taken
        weights = weights / weights.sum(-1, keepdims=True)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, width, 2 * hidden))
        down = self.param("down", init, (self.experts, hidden, width))
        h = jnp.einsum("bld,edf->blef", x, up)
        h = nn.silu(h[..., :hidden]) * h[..., hidden:]
        shared = nn.Dense(width)(nn.silu(nn.Dense(16)(x)))
        return jnp.einsum("blef,efd,ble->bld", h, down, weights) + shared


class LongConvolution(nn.Module):
    """A convolution as long as the sequence, by FFT, with a filter made of positions (Hyena)."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        length, width = x.shape[1:]
        h = nn.Conv(3 * width, (3,), feature_group_count=3 * width, padding=[(2, 0)])(
            nn.Dense(3 * width)(x)
        )
        q, k, v = jnp.split(h, 3, -1)
        t = jnp.linspace(0, 1, 32)[:length, None]
        waves = jnp.concatenate([t, jnp.sin(8 * t), jnp.cos(8 * t)], -1)
        decay = self.param("decay", nn.initializers.ones, (width,))
        kernel = nn.Dense(width)(jnp.sin(nn.Dense(16)(waves))) * jnp.exp(-t * jnp.abs(decay))
        size = 2 * length
        found = jnp.fft.rfft(k * v, size, axis=1) * jnp.fft.rfft(kernel, size, axis=0)
        return nn.Dense(width)(q * jnp.fft.irfft(found, size, axis=1)[:, :length])


def own_attention(x: Any) -> Any:
    return nn.MultiHeadDotProductAttention(2)(x, x, mask=nn.make_causal_mask(x[..., 0]))


def dense(x: Any) -> Any:
    return nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


class Stack(nn.Module):
    """A language model of two blocks; a block has two parts, each behind a norm."""

    parts: tuple[Callable[[Any], Any], Callable[[Any], Any]]
    norm: Any = nn.LayerNorm

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens)
        for _ in range(2):
            for part in self.parts:
                x = x + part(self.norm()(x))
        return embed.attend(self.norm()(x))


class Critic(nn.Module):
    """The critic of a Wasserstein GAN."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.LayerNorm()(nn.swish(nn.Dense(WIDTH)(x)))
        return nn.Dense(1)(x)[..., 0]


def with_penalty(apply: Any, batch: Any, *, train: bool) -> Any:
    """The critic's loss with a penalty on its gradient by its inputs (WGAN-GP)."""
    slopes = jax.vmap(jax.grad(lambda x: apply(x[None])[0]))(batch["x"])
    penalty = jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)
    return jnp.mean(apply(batch["x"])) - jnp.mean(apply(batch["fake"])) + 10 * penalty


class Field(nn.Module):
    """A function of the plane."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = jnp.sin(nn.Dense(WIDTH)(x))
        for _ in range(2):
            x = jnp.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(x)[..., 0]


def poisson(apply: Any, batch: Any, *, train: bool) -> Any:
    """The residual of an equation with a Laplacian, by forward mode over forward mode (PINN)."""

    def along(x: Any, v: Any) -> Any:
        def slope(z: Any) -> Any:
            return jax.jvp(lambda y: apply(y[None])[0], (z,), (v,))[1]

        return jax.jvp(slope, (x,), (v,))[1]

    laplacian = jax.vmap(lambda x: sum(along(x, v) for v in jnp.eye(2)))(batch["x"])
    return jnp.mean((laplacian + batch["f"][:, 0]) ** 2) + jnp.mean(apply(batch["edge"]) ** 2)


class WaveFunction(nn.Module):
    """The logarithm of sums of determinants of orbitals (FermiNet)."""

    @nn.compact
    def __call__(self, places: Any) -> Any:
        h = places
        for _ in range(2):
            mean = jnp.broadcast_to(h.mean(-2, keepdims=True), h.shape)
            h = jnp.tanh(nn.Dense(16)(jnp.concatenate([h, mean], -1)))
        envelope = jnp.exp(-jnp.linalg.norm(places, axis=-1))[..., None, :, None]
        orbitals = nn.DenseGeneral((2, 3))(h).swapaxes(-2, -3) * envelope
        signs, logs = jnp.linalg.slogdet(orbitals)
        largest = logs.max(-1, keepdims=True)
        weights = self.param("weights", nn.initializers.ones, (2,))
        total = (weights * signs * jnp.exp(logs - largest)).sum(-1)
        return jnp.log(jnp.abs(total) + 1e-3) + largest[..., 0]


class KalmanFilter(nn.Module):
    """The likelihood of a filter with a learned transition: solves and Cholesky in a scan."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def near_one(key: Any, shape: Any) -> Any:
            return 0.9 * jnp.eye(*shape) + 0.05 * jax.random.normal(key, shape)

        move = self.param("move", near_one, (4, 4))
        look = self.param("look", nn.initializers.normal(0.5), (3, 4))
        noise = jnp.exp(self.param("noise", nn.initializers.zeros, (4,)))
        error = jnp.exp(self.param("error", nn.initializers.zeros, (3,)))
        seen = nn.Dense(3)(nn.tanh(nn.Dense(16)(x)))

        def turn(carry: Any, y: Any) -> Any:
            mean, spread = move @ carry[0], move @ carry[1] @ move.T + jnp.diag(noise)
            of_y = look @ spread @ look.T + jnp.diag(error)
            gain, off = jnp.linalg.solve(of_y, look @ spread).T, y - look @ mean
            root = jnp.linalg.cholesky(of_y)
            likely = -0.5 * (off @ jnp.linalg.solve(of_y, off)) - jnp.log(jnp.diagonal(root)).sum()
            return (mean + gain @ off, spread - gain @ look @ spread), likely

        def one(row: Any) -> Any:
            return jax.lax.scan(turn, (jnp.zeros(4), jnp.eye(4)), row)[1].sum()

        return jax.vmap(one)(seen)


class Radiance(nn.Module):
    """Colours along rays, sampled again where the first samples are dense (NeRF)."""

    @nn.compact
    def __call__(self, start: Any, ahead: Any) -> Any:
        t = jnp.broadcast_to(jnp.linspace(0.5, 2, 8), (start.shape[0], 8))
        first, weights = self._render(start, ahead, t)
        total = jnp.cumsum(jax.lax.stop_gradient(weights) + 1e-3, -1)
        total, wanted = total / total[:, -1:], jnp.linspace(0.05, 0.95, 8)
        at = jnp.clip(jax.vmap(lambda row: jnp.searchsorted(row, wanted))(total), 0, 7)
        fine = jnp.concatenate([t, jnp.take_along_axis(t, at, 1) + 0.03], -1)
        return first, self._render(start, ahead, jnp.sort(fine, -1))[0]

    def _render(self, start: Any, ahead: Any, t: Any) -> Any:
        places = start[:, None] + ahead[:, None] * t[..., None]
        waves = [f(places * 2.0**i) for i in range(3) for f in (jnp.sin, jnp.cos)]
        h = jnp.concatenate(waves, -1)
        for _ in range(2):
            h = nn.relu(nn.Dense(WIDTH)(h))
        ahead = jnp.broadcast_to(ahead[:, None], places.shape)
        colours = nn.sigmoid(nn.Dense(3)(jnp.concatenate([h, ahead], -1)))
        steps = jnp.concatenate([jnp.diff(t), jnp.full_like(t[:, :1], 0.5)], -1)
        alpha = 1 - jnp.exp(-nn.softplus(nn.Dense(1)(h))[..., 0] * steps)
        left = jnp.cumprod(1 - alpha + 1e-10, -1)
        weights = alpha * jnp.concatenate([jnp.ones_like(left[:, :1]), left[:, :-1]], -1)
        return (weights[..., None] * colours).sum(1), weights


def colours(apply: Any, batch: Any, *, train: bool) -> Any:
    first, second = apply(batch["start"], batch["ahead"])
    return distance(first) + distance(second)


class Doubled(nn.Module):
    """A layer that shares its scope with its owner."""

    def setup(self) -> None:
        self.inner = nn.Dense(16)
        nn.share_scope(self, self.inner)

    def __call__(self, x: Any) -> Any:
        return 2 * self.inner(x)


class LinenTransforms(nn.Module):
    """`map_variables` of transposed kernels, `custom_vjp` of a module, and `share_scope`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def transposed(variables: Any) -> Any:
            return jax.tree.map(lambda p: p.T if p.ndim == 2 else p, variables)

        def call(module: Any, x: Any) -> Any:
            return module(x)

        def forward(module: Any, x: Any) -> Any:
            return nn.vjp(call, module, x)

        def backward(pullback: Any, ct: Any) -> Any:
            return jax.tree.map(lambda g: 2.0 * g, pullback(ct))

        x = nn.Dense(16)(x)
        x = nn.map_variables(
            nn.Dense,
            "params",
            trans_in_fn=transposed,
            trans_out_fn=transposed,
            init=self.is_initializing(),
            mutable=self.is_initializing(),
        )(16, name="mapped")(x)
        doubled = nn.custom_vjp(call, forward_fn=forward, backward_fn=backward)
        return nn.Dense(4)(Doubled(name="shared")(doubled(nn.Dense(16, name="ruled"), x)))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16)(x)


class NnxTransforms(nnx.Module):
    """`nnx.cond` over modules, `nnx.vmap` over a bank of them, and a linen module inside."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.chosen = nnx.Linear(16, 16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)
        self.linen = nnx.bridge.ToNNX(LinenLayer(), rngs=rngs)
        self.linen.lazy_init(jnp.ones((1, 16)))

        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def bank(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(16, 16, rngs=rngs)

        self.bank = bank(rngs)

    def __call__(self, x: Any) -> Any:
        x = jnp.tanh(self.first(x))
        x = nnx.cond(jnp.sum(self.last.bias[...]) >= 0, _as_is, _negative, self.chosen, x)
        x = x + self.linen(x)
        each = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.bank, x)
        return self.last(jnp.einsum("ebd,ebd->bd", nn.softmax(each, 0), each))


def _as_is(layer: nnx.Linear, x: Any) -> Any:
    return layer(x)


def _negative(layer: nnx.Linear, x: Any) -> Any:
    return -layer(x)


LANGUAGE: dict[str, Callable[[], Built]] = {
    "experts by sorting": lambda: language_model(
        Stack(parts=(own_attention, lambda x: SortedExperts()(x)))
    ),
    "latent attention, balanced experts": lambda: language_model(
        Stack(
            parts=(lambda x: LatentAttention()(x), lambda x: BalancedExperts()(x)), norm=nn.RMSNorm
        )
    ),
    "long convolution by FFT": lambda: language_model(
        Stack(parts=(lambda x: LongConvolution()(x), dense))
    ),
}

OTHER: dict[str, Callable[[], Built]] = {
    "critic with a gradient penalty": lambda: Built(
        model=Critic(), loss=with_penalty, batch={"x": floats(6), "fake": floats(6)[::-1] * 2}
    ),
    "field with a Laplacian": lambda: Built(
        model=Field(),
        loss=poisson,
        batch={"x": floats(2), "f": floats(1), "edge": floats(2)[::-1] * 2},
        rate=1e-4,
    ),
    "wave function": lambda: Built(
        model=WaveFunction(), loss=to_waves(on_x), batch={"x": floats(3, 3)}, rate=1e-4
    ),
    "Kalman filter": lambda: Built(
        model=KalmanFilter(), loss=to_waves(on_x), batch={"x": floats(6, 5)}, rate=1e-4
    ),
    "radiance field": lambda: Built(
        model=Radiance(), loss=colours, batch={"start": floats(3), "ahead": floats(3)[::-1] * 1.0}
    ),
    "linen transforms": lambda: Built(
        model=LinenTransforms(), loss=to_waves(on_x), batch={"x": floats(12)}
    ),
    "nnx transforms": lambda: Built(
        model=lambda rngs: NnxTransforms(rngs), loss=to_waves(on_x), batch={"x": floats(12)}
    ),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(name=name, kind=kind, package="in the way of public code", build=build)
        for kind, models in (("language model", LANGUAGE), ("other", OTHER))
        for name, build in models.items()
    ]
