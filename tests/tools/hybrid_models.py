"""Language models for the hybrid engine that are not in models/.

Shape letters as in `models/`: B batch, L positions, M places of a cache, D width, N heads, H head
width.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from zeroxla.models.losses import next_token_loss


def rotate_pairs(x_BLNH, positions_BL, num):
    """Rotate the first `num` elements of each head, in pairs of neighbours, by their positions."""
    turned, rest = x_BLNH[..., :num], x_BLNH[..., num:]
    rates = 10000.0 ** (-jnp.arange(0, num, 2) / num)
    angles = (positions_BL[..., None] * rates)[:, :, None, :]
    even, odd = turned[..., ::2], turned[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([pairs.reshape(turned.shape), rest], axis=-1)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + perceptron(norm(x)), as GPT-J has it."""

    heads: int
    decode: bool

    @nn.compact
    def __call__(self, x, position_ids, attention_mask, index):
        width = x.shape[-1]
        h = nn.LayerNorm(name="ln")(x)

        def heads(name):
            return nn.DenseGeneral((self.heads, width // self.heads), use_bias=False, name=name)(h)

        q, k = (rotate_pairs(heads(name), position_ids, 4) for name in ("q", "k"))
        v = heads("v")
        if self.decode:
            started = self.has_variable("cache", "cached_key")
            keys = self.variable("cache", "cached_key", jnp.zeros_like, k)
            values = self.variable("cache", "cached_value", jnp.zeros_like, v)
            if started:
                places = index + jnp.arange(x.shape[1])
                kind = keys.value.dtype
                keys.value = k = keys.value.at[:, places].set(k.astype(kind))
                values.value = v = values.value.at[:, places].set(v.astype(kind))
        scores = jnp.einsum("blnh,bmnh->bnlm", q, k) / jnp.sqrt(q.shape[-1])
        seen = (index + jnp.arange(x.shape[1]))[:, None] >= jnp.arange(k.shape[1])
        seen = seen[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask.astype(bool)[:, None, None, :]
        probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
        mixed = jnp.einsum("bnlm,bmnh->blnh", probs, v)
        attended = nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, name="out")(mixed)
        hidden = nn.gelu(nn.Dense(3 * width, name="fc_in")(h))
        return x + attended + nn.Dense(width, name="fc_out")(hidden)


class ParallelGPT(nn.Module):
    """Rotary positions, parallel blocks, an untied head with a bias."""

    vocab: int = 48
    max_position_embeddings: int = 64
    layers: int = 2
    width: int = 32
    heads: int = 4
    decode: bool = False

    @nn.compact
    def __call__(self, input_ids, attention_mask=None, position_ids=None):
        index = 0
        if self.decode:
            started = self.has_variable("cache", "cache_index")
            counter = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
            index = counter.value
            if started:
                counter.value += input_ids.shape[1]
        if position_ids is None:
            position_ids = index + jnp.arange(input_ids.shape[1])[None]
        x = nn.Embed(self.vocab, self.width, name="wte")(input_ids)
        for i in range(self.layers):
            block = ParallelBlock(self.heads, self.decode, name=f"h_{i}")
            x = block(x, position_ids, attention_mask, index)
        return nn.Dense(self.vocab, name="lm_head")(nn.LayerNorm(name="ln_f")(x))

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


class NoCache(nn.Module):
    """A causal model that takes tokens and nothing else: a running mean."""

    vocab: int = 24
    width: int = 16

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width, name="embed")(tokens)
        counts = jnp.arange(1, tokens.shape[1] + 1)[None, :, None]
        mean = jnp.cumsum(nn.Dense(self.width, name="mix")(x), axis=1) / counts
        hidden = nn.tanh(nn.Dense(4 * self.width, name="up")(x + mean))
        return nn.Dense(self.vocab, name="head")(nn.Dense(self.width, name="down")(hidden))

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


class RepeatedHeads(nnx.Module):
    """One attention layer whose key-value heads are repeated for the queries that share them."""

    def __init__(self, *, heads=8, kv_heads=2, width=32, vocab=32, length=32, rngs):
        self.heads, self.kv_heads, self.length = heads, kv_heads, length
        head = width // heads
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.q = nnx.Linear(width, width, rngs=rngs)
        self.kv = nnx.Linear(width, 2 * kv_heads * head, rngs=rngs)
        self.o = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        batch, length, width = x.shape
        h = self.norm(x)
        q = self.q(h).reshape(batch, length, self.heads, -1)
        k, v = (
            jnp.repeat(y.reshape(batch, length, self.kv_heads, -1), self.heads // self.kv_heads, 2)
            for y in jnp.split(self.kv(h), 2, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o(mixed.reshape(batch, length, width)))

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)
