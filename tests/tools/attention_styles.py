"""Attention as people write it by hand: models of linen and nnx, whose traces are rewritten.

Shape letters: B batch, L positions, N query heads, K key-value heads, G = N / K, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY, WIDTH, HEADS, HEAD = 64, 32, 4, 8
LENGTH = 48


def batch_of(rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens, and a mask whose rows end in padding."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, VOCABULARY, (rows, length + 1)).astype(np.int32)
    ends = draw.integers(length // 2, length + 1, (rows, 1))
    return {"tokens": tokens, "mask": (np.arange(length) < ends).astype(np.float32)}


def _causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def einsum_boolean(q, k, v, mask, rng):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(_causal(q.shape[1]), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def matmul_additive(q, k, v, mask, rng):
    """Matrix products, a mask that is added, and a softmax of one's own."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q @ k.swapaxes(-1, -2)) * HEAD**-0.5
    scores = scores + (1.0 - _causal(q.shape[2])[None, None].astype(jnp.float32)) * -1e9
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    return (probs @ v).transpose(0, 2, 1, 3)


def alibi(q, k, v, mask, rng):
    length = q.shape[1]
    slopes = 2.0 ** (-8.0 * jnp.arange(1, HEADS + 1) / HEADS)
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    scores += slopes[:, None, None] * distance
    scores = jnp.where(distance > 0, -jnp.inf, scores)
    return jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)


def _rotated(x):
    length, half = x.shape[1], x.shape[-1] // 2
    angles = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotary_repeated(q, k, v, mask, rng):
    """Rotary positions, and key heads that are repeated for the query heads."""
    q, k = _rotated(q), _rotated(k[:, :, :2])
    k, v = (jnp.repeat(x, HEADS // 2, axis=2) for x in (k, v[:, :, :2]))
    scores = jnp.einsum("blhd,bmhd->bhlm", q * HEAD**-0.5, k).astype(jnp.float32)
    scores = jnp.where(_causal(q.shape[1])[None, None], scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores).astype(v.dtype), v)


def grouped(q, k, v, mask, rng):
    """Heads in groups, a float32 softmax."""
    length = q.shape[1]
    q, k, v = q.reshape(-1, length, 2, HEADS // 2, HEAD), k[:, :, :2], v[:, :, :2]
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores *= HEAD**-0.5
    seen = jnp.arange(length)[None, :] <= jnp.arange(length)[:, None]
    scores = jnp.where(seen[None, None, None], scores, -2.3819763e38)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", probs, v).reshape(-1, length, HEADS, HEAD)


def padded(q, k, v, mask, rng):
    """Causal, and padding from the batch."""
    seen = nn.combine_masks(
        nn.make_causal_mask(mask), nn.make_attention_mask(jnp.ones_like(mask), mask)
    )
    assert seen is not None
    scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(HEAD), k)
    scores = jnp.where(seen > 0, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)


def bidirectional(q, k, v, mask, rng):
    """An encoder's: all positions but padding, whose mask is added, as BERT has it."""
    bias = (1.0 - mask[:, None, None, :]) * -10000.0
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD) + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def window_capped(q, k, v, mask, rng):
    """A sliding window, scores capped by tanh, probabilities from a logarithm."""
    length = q.shape[1]
    places = jnp.arange(length)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < 20)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * HEAD**-0.5, k)
    scores = 5.0 * jnp.tanh(scores / 5.0)
    scores = jnp.where(seen, scores, -1e30)
    probs = jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)


def with_dropout(q, k, v, mask, rng):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    scores = jnp.where(_causal(q.shape[1]), scores, -1e9)
    probs = jax.nn.softmax(scores)
    kept = jax.random.bernoulli(rng, 0.8, probs.shape)
    probs = jnp.where(kept, probs / 0.8, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)


def softmax_where(q, k, v, mask, rng):
    """JAX's softmax with `where`, and segments that see themselves alone."""
    segments = jnp.cumsum(mask == 0, axis=-1)
    seen = (segments[:, None, :, None] == segments[:, None, None, :]) & _causal(q.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    probs = jax.nn.softmax(scores, axis=-1, where=seen)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)


def keys_first(q, k, v, mask, rng):
    """One head for all keys and values, and scores whose first dim is the keys'."""
    k, v = k[:, :, 0], v[:, :, 0]
    scores = jnp.einsum("bkd,bqhd->bkhq", k, q) * HEAD**-0.5
    places = jnp.arange(q.shape[1])
    scores = jnp.where((places[:, None] > places)[None, :, None, :], -1e9, scores)
    return jnp.einsum("bkhq,bkd->bqhd", jax.nn.softmax(scores, axis=1), v)


Attention = Callable[..., jax.Array]


class _Layer(nn.Module):
    attention: Attention

    @nn.compact
    def __call__(self, x, mask):
        rows, length, _ = x.shape
        y = nn.LayerNorm(name="norm")(x)
        q, k, v = (
            nn.Dense(WIDTH, name=name)(y).reshape(rows, length, HEADS, HEAD) for name in "qkv"
        )
        with jax.named_scope("attend"):
            y = self.attention(q, k, v, mask, self.make_rng("dropout"))
        x = x + nn.Dense(WIDTH, name="out")(y.reshape(rows, length, WIDTH))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x)))


class _Scanned(_Layer):
    @nn.compact
    def __call__(self, x, mask):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Layer.__call__(self, x, mask), None


class LinenModel(nn.Module):
    """Next tokens, by layers with any attention: written out, scanned, or scanned with remat."""

    attention: Attention
    layers: str = "unrolled"

    @nn.compact
    def loss(self, batch, *, train):
        tokens = batch["tokens"]
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens[:, :-1])
        mask = batch["mask"]
        if self.layers == "unrolled":
            for i in range(2):
                x = _Layer(self.attention, name=f"h_{i}")(x, mask)
        else:
            layer: Any = _Scanned
            if self.layers == "remat":
                layer = nn.remat(layer, prevent_cse=False)
            scanned = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=2,
            )
            x, _ = scanned(self.attention, name="h")(x, mask)
        return _mean_loss(nn.Dense(VOCABULARY, name="head")(x), tokens[:, 1:], mask)


class LinenOwn(nn.Module):
    """The attention of linen."""

    @nn.compact
    def loss(self, batch, *, train):
        tokens = batch["tokens"]
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens[:, :-1])
        seen = nn.make_causal_mask(tokens[:, :-1])
        for i in range(2):
            attention = nn.MultiHeadDotProductAttention(
                num_heads=HEADS, dropout_rate=0.1, deterministic=False, name=f"h_{i}"
            )
            x = x + attention(x, mask=seen)
        return _mean_loss(nn.Dense(VOCABULARY, name="head")(x), tokens[:, 1:], batch["mask"])


class NnxModel(nnx.Module):
    """Next tokens, by two layers with any attention."""

    def __init__(self, attention: Attention, rngs: nnx.Rngs):
        self.attention, self.rngs = attention, rngs
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.projections = nnx.List([nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs) for _ in range(2)])
        self.out = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def loss(self, batch, *, train):
        tokens = batch["tokens"]
        x = self.embed(tokens[:, :-1])
        for project, out in zip(self.projections, self.out, strict=True):
            q, k, v = jnp.split(project(x), 3, axis=-1)
            q, k, v = (y.reshape(*y.shape[:2], HEADS, HEAD) for y in (q, k, v))
            y = self.attention(q, k, v, batch["mask"], self.rngs.dropout())
            x = x + out(y.reshape(x.shape))
        return _flat_loss(self.head(x), tokens[:, 1:], batch["mask"])


class NnxOwn(nnx.Module):
    """The attention of nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def loss(self, batch, *, train):
        tokens = batch["tokens"]
        x = self.embed(tokens[:, :-1])
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens[:, :-1]))
        return _mean_loss(self.head(x), tokens[:, 1:], batch["mask"])


def _mean_loss(logits, targets, mask):
    logprobs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    return (losses * mask).sum() / mask.sum()


def _flat_loss(logits, targets, mask):
    """The same mean, of logits whose rows and positions are flattened."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.reshape(-1, VOCABULARY), targets.reshape(-1)
    )
    return (losses * mask.reshape(-1)).sum() / mask.sum()


def _nnx(attention: Attention) -> Any:
    return lambda rngs: NnxModel(attention, rngs)


STYLES: dict[str, Callable[[], Any]] = {
    "einsum, boolean mask, scanned": functools.partial(
        LinenModel, attention=einsum_boolean, layers="scanned"
    ),
    "matmul, mask added, own softmax": functools.partial(LinenModel, attention=matmul_additive),
    "linen's own, dropout": LinenOwn,
    "nnx's own": lambda: lambda rngs: NnxOwn(rngs),
    "alibi": functools.partial(_nnx, alibi),
    "rotary, repeated heads": functools.partial(_nnx, rotary_repeated),
    "grouped heads, remat": functools.partial(LinenModel, attention=grouped, layers="remat"),
    "causal and padding": functools.partial(LinenModel, attention=padded, layers="scanned"),
    "bidirectional, padding": functools.partial(_nnx, bidirectional),
    "window, capped, logarithm": functools.partial(LinenModel, attention=window_capped),
    "dropout": functools.partial(LinenModel, attention=with_dropout, layers="scanned"),
    "softmax with where": functools.partial(_nnx, softmax_where),
    "keys first, one key head": functools.partial(LinenModel, attention=keys_first),
}
"""Functions that return a model for `make_step`."""

CAUSAL = (
    "einsum, boolean mask, scanned",
    "matmul, mask added, own softmax",
    "nnx's own",
    "rotary, repeated heads",
    "grouped heads, remat",
    "keys first, one key head",
)
"""The styles that are causal attention and nothing else."""
