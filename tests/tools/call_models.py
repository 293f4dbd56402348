"""Small language models whose calls and caches are those of public ones.

Shape letters: B batch, L positions, M places of a cache, D width, N heads, H head width.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from zeroxla.models.losses import next_token_loss

VOCAB, WIDTH, HEADS, CONTEXT = 24, 16, 2, 32


@dataclasses.dataclass(frozen=True)
class Config:
    """The attribute `config` of public models; its `max_length` is about something else."""

    max_position_embeddings: int = CONTEXT
    max_length: int = 20
    decode: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    """The result of public models."""

    logits: Any
    hidden_states: Any = None


def places_of(tokens):
    """Return positions int32[B, L] that count from 0."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def mix(q_BLNH, k_BMNH, v_BMNH, seen):
    """Attention with a mask that broadcasts to [B, N, L, M]."""
    scores = jnp.einsum("blnh,bmnh->bnlm", q_BLNH, k_BMNH) / jnp.sqrt(q_BLNH.shape[-1])
    probs = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bnlm,bmnh->blnh", probs, v_BMNH)


class Model(nn.Module):
    """A base with an embedding and a head; `whole` calls the model on whole rows."""

    def loss(self, batch, *, train):
        return next_token_loss(self.whole(self, batch["tokens"][:, :-1]), batch)

    @staticmethod
    def whole(call, tokens):
        return call(tokens)


class PublicAttention(nn.Module):
    """Attention whose cache is made by a flag, and filled with several tokens at a time."""

    dtype: Any

    @nn.compact
    def __call__(self, x, attention_mask, init_cache):
        heads = (HEADS, WIDTH // HEADS)
        q, k, v = (nn.DenseGeneral(heads, dtype=self.dtype, name=name)(x) for name in "qkv")
        length, index = x.shape[1], 0
        if init_cache or self.has_variable("cache", "cached_key"):
            is_made = self.has_variable("cache", "cached_key")
            keys = self.variable("cache", "cached_key", jnp.zeros, k.shape, k.dtype)
            values = self.variable("cache", "cached_value", jnp.zeros, v.shape, v.dtype)
            count = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
            if is_made:
                index = count.value
                # As in public models, the cache must have the dtype of the keys.
                k = jax.lax.dynamic_update_slice(keys.value, k, (0, index, 0, 0))
                v = jax.lax.dynamic_update_slice(values.value, v, (0, index, 0, 0))
                keys.value, values.value, count.value = k, v, index + length
        causal = index + jnp.arange(length)[:, None] >= jnp.arange(k.shape[1])
        seen = causal[None, None] & (attention_mask[:, None, None, :] > 0)
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), name="o")(mix(q, k, v, seen))


class PublicModel(Model):
    """The signature of transformers: positions and the mask are required."""

    config: Config = Config()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        input_ids,
        attention_mask,
        position_ids,
        encoder_attention_mask=None,
        deterministic: bool = True,
        init_cache: bool = False,
        return_dict: bool = True,
    ):
        x = nn.Embed(VOCAB, WIDTH, name="wte")(input_ids)
        x += nn.Embed(CONTEXT, WIDTH, name="wpe")(position_ids)
        attention = PublicAttention(self.dtype, name="attn")
        x += attention(nn.LayerNorm(name="ln")(x), attention_mask, init_cache)
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        logits = nn.Dense(VOCAB, name="head")(nn.LayerNorm(name="ln_f")(x))
        return Output(logits) if return_dict else (logits,)

    @staticmethod
    def whole(call, tokens):
        return call(tokens, jnp.ones_like(tokens), places_of(tokens)).logits


class OneToken(Model):
    """Flax's own attention, whose cache takes one token a call, and a counter of positions.

    The switch is a field of the model, or one of its config.
    """

    config: Config = Config()

    @nn.compact
    def __call__(self, inputs):
        decode = self.config.decode
        start = 0
        if decode:
            is_made = self.has_variable("cache", "position")
            count = self.variable("cache", "position", lambda: jnp.array(0, jnp.int32))
            start = count.value
            if is_made:
                count.value += 1
        x = nn.Embed(VOCAB, WIDTH)(inputs)
        x += nn.Embed(CONTEXT, WIDTH, name="wpe")(start + places_of(inputs))
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, decode=decode)
        x += attention(nn.LayerNorm()(x), mask=None if decode else nn.make_causal_mask(inputs))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class OneTokenMasked(Model):
    """The same with positions and a mask, so that rows can be padded; in training by default."""

    decode: bool = False
    length: int = CONTEXT

    @nn.compact
    def __call__(self, tokens, positions=None, padding_mask=None, *, train: bool = True):
        positions = places_of(tokens) if positions is None else positions
        mask = None if self.decode else nn.make_causal_mask(tokens)
        if padding_mask is not None:
            mask = nn.combine_masks(mask, padding_mask[:, None, None, :] > 0)
        x = nn.Embed(VOCAB, WIDTH)(tokens) + nn.Embed(CONTEXT, WIDTH, name="wpe")(positions)
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS, decode=self.decode)
        x += nn.Dropout(0.5)(attention(nn.LayerNorm()(x), mask=mask), deterministic=not train)
        return {"logits": nn.Dense(VOCAB)(nn.LayerNorm()(x))}

    def loss(self, batch, *, train):
        logits = self(batch["tokens"][:, :-1], train=train)["logits"]
        return next_token_loss(logits, batch)

    @staticmethod
    def whole(call, tokens):
        return call(tokens, train=False)["logits"]


class OneTokenNnx(nnx.Module):
    """nnx attention layers, whose own caches nobody makes for them."""

    def __init__(self, *, rngs):
        self.length = CONTEXT
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs) for _ in range(2)
        )
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, x, deterministic=True):
        mask = nnx.make_causal_mask(x)
        x = self.embed(x)
        for layer in self.layers:
            mask = None if layer.decode else mask
            x = x + layer(self.norm(x), mask=mask, deterministic=deterministic)
        return self.head(x), None

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1])[0], batch)

    @staticmethod
    def whole(call, tokens):
        return call(tokens)[0]


class Given(Model):
    """A cache that is given and returned, and a mask that says for each token what it sees."""

    length: int = CONTEXT

    @nn.compact
    def __call__(self, last_tokens, segment_pos, cache, attention_mask):
        x = nn.Embed(VOCAB, WIDTH)(last_tokens) + nn.Embed(CONTEXT, WIDTH, name="wpe")(segment_pos)
        heads, h = (HEADS, WIDTH // HEADS), nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral(heads, name=name)(h) for name in "qkv")
        if cache is not None:
            start = (0, cache["end_index"], 0, 0)
            k = jax.lax.dynamic_update_slice(cache["k"], k.astype(cache["k"].dtype), start)
            v = jax.lax.dynamic_update_slice(cache["v"], v.astype(cache["v"].dtype), start)
            cache = {"k": k, "v": v, "end_index": cache["end_index"] + x.shape[1]}
        x += nn.DenseGeneral(WIDTH, axis=(-2, -1))(mix(q, k, v, attention_mask[:, None]))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x)), cache

    def init_cache(self, batch_size, cache_length, dtype=jnp.float32):
        shape = (batch_size, cache_length, HEADS, WIDTH // HEADS)
        zeros = jnp.zeros(shape, dtype)
        return {"k": zeros, "v": zeros, "end_index": jnp.int32(0)}

    @staticmethod
    def whole(call, tokens):
        length = tokens.shape[1]
        mask = jnp.broadcast_to(jnp.tri(length, dtype=bool), (len(tokens), length, length))
        return call(tokens, places_of(tokens), None, mask)[0]


class Recurrent(Model):
    """A running sum with a memory that the call needs, and that does not begin with zeros."""

    length: int = CONTEXT

    @nn.compact
    def __call__(self, tokens, cache):
        x = nn.Dense(WIDTH, name="mix")(nn.Embed(VOCAB, WIDTH)(tokens))
        sums = cache["sum"][:, None] + jnp.cumsum(x, axis=1)
        counts = cache["count"] + jnp.arange(tokens.shape[1])
        mean = sums / counts[:, None]
        logits = nn.Dense(VOCAB)(nn.tanh(nn.Dense(WIDTH)(x + mean)))
        return logits, {"sum": sums[:, -1], "count": counts[-1] + 1}

    @staticmethod
    def make_cache(rows, places, dtype):
        """An empty memory; `places` does not matter to it."""
        return {"sum": jnp.ones((rows, WIDTH), dtype), "count": jnp.float32(2)}

    @staticmethod
    def whole(call, tokens):
        return call(tokens, Recurrent.make_cache(len(tokens), 0, jnp.float32))[0]


class Dictionary(Model):
    """A call whose only argument is a dict of arrays, which no name tells."""

    length: int = CONTEXT

    @nn.compact
    def __call__(self, features):
        x = nn.Embed(VOCAB, WIDTH)(features["ids"])
        mean = jnp.cumsum(nn.Dense(WIDTH)(x), axis=1) / (1 + features["places"][..., None])
        return nn.Dense(VOCAB)(nn.tanh(x + mean))

    @staticmethod
    def whole(call, tokens):
        return call({"ids": tokens, "places": places_of(tokens)})


class Blocks(Model):
    """Rows must have a multiple of `size` tokens."""

    size: int = 12
    length: int = 40

    @nn.compact
    def __call__(self, tokens):
        rows, length = tokens.shape
        x = nn.Embed(VOCAB, WIDTH)(tokens).reshape(rows, length // self.size, self.size, WIDTH)
        within = jnp.cumsum(nn.Dense(WIDTH)(x), axis=2)
        return nn.Dense(VOCAB)(nn.tanh(x + within)).reshape(rows, length, VOCAB)

    @staticmethod
    def whole(call, tokens):
        padded = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % 48)))
        return call(padded)[:, : tokens.shape[1]]


class Shifted(Model):
    """Logits that predict the token at their own place, from the tokens before it."""

    length: int = CONTEXT

    @nn.compact
    def __call__(self, tokens):
        before = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = nn.Embed(VOCAB, WIDTH)(before)
        attention = nn.MultiHeadDotProductAttention(num_heads=HEADS)
        return nn.Dense(VOCAB)(x + attention(x, mask=nn.make_causal_mask(before)))

    @staticmethod
    def whole(call, tokens):
        return call(jnp.pad(tokens, ((0, 0), (0, 1))))[:, 1:]


class Hidden(Model):
    """A call that returns hidden states; the embedding makes logits of them."""

    length: int = CONTEXT

    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.mix = nn.RNN(nn.GRUCell(WIDTH))

    def __call__(self, tokens):
        return self.mix(self.embed(tokens))

    @staticmethod
    def whole(model, tokens):
        return model.embed.attend(model(tokens))


class HiddenNnx(nnx.Module):
    """The same in nnx: a running sum."""

    whole = staticmethod(Hidden.whole)

    def __init__(self, *, rngs):
        self.length = CONTEXT
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens):
        return jnp.tanh(jnp.cumsum(self.mix(self.embed(tokens)), axis=1))

    def loss(self, batch, *, train):
        return next_token_loss(self.whole(self, batch["tokens"][:, :-1]), batch)


class Bidirectional(Model):
    """Attention to all tokens."""

    length: int = CONTEXT

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        return nn.Dense(VOCAB)(x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(x))


class NeverPadded(Model):
    """A cache that takes several tokens, but lets each of them see those after it; or one that
    forgets each token in its own call."""

    decode: bool = False
    forgets: bool = False
    length: int = CONTEXT

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        k = nn.Dense(WIDTH)(x)
        index, end = 0, tokens.shape[1]
        if self.decode:
            is_made = self.has_variable("cache", "k")
            keys = self.variable("cache", "k", jnp.zeros_like, k)
            count = self.variable("cache", "index", lambda: jnp.array(0, jnp.int32))
            if is_made:
                index = count.value
                k = jax.lax.dynamic_update_slice(keys.value, k, (0, index, 0))
                keys.value, count.value = k, index + end
        seen = jnp.arange(k.shape[1]) < index + end - (self.forgets and self.decode)
        if not self.decode:
            seen = seen & jnp.tri(end, dtype=bool)
        scores = jnp.where(seen, jnp.einsum("bld,bmd->blm", x, k), -1e9)
        return nn.Dense(VOCAB)(x + jnp.einsum("blm,bmd->bld", jax.nn.softmax(scores), k))
