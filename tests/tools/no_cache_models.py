"""Language models without a cache: causal, each in another way."""

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from tools.hybrid_models import next_token_loss

VOCAB, WIDTH = 24, 16


class Tokens(nn.Module):
    """Tokens in, logits out; subclasses say what is between."""

    def mix(self, x):
        raise NotImplementedError

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(VOCAB)(self.mix(nn.Embed(VOCAB, WIDTH)(tokens)))

    def loss(self, batch, *, train):
        return next_token_loss(self(batch["tokens"][:, :-1]), batch)


class Attention(Tokens):
    """Flax's own attention, and learned positions."""

    def mix(self, x):
        x = x + self.param("places", nn.initializers.normal(), (64, WIDTH))[: x.shape[1]]
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x


class Rotary(Tokens):
    """Rotated queries and keys; two queries share a key; softmax written by hand."""

    def mix(self, x):
        rows, length, _ = x.shape
        query = nn.Dense(4 * 8, use_bias=False)(x).reshape(rows, length, 2, 2, 8)
        key, value = (nn.Dense(2 * 8)(x).reshape(rows, length, 2, 1, 8) for _ in range(2))
        angle = jnp.arange(length)[:, None] / 10 ** (jnp.arange(4) / 4)
        angle = jnp.concatenate([angle, angle], -1)[:, None, None]

        def turned(x):
            other = jnp.concatenate([-x[..., 4:], x[..., :4]], -1)
            return x * jnp.cos(angle) + other * jnp.sin(angle)

        keys, values = (jnp.repeat(y, 2, axis=3) for y in (turned(key), value))
        scores = jnp.einsum("bthgd,bshgd->bhgts", turned(query), keys) / 8**0.5
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e30)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        mixed = jnp.einsum("bhgts,bshgd->bthgd", weights, values)
        return x + nn.Dense(WIDTH)(mixed.reshape(rows, length, -1))


class Block(nn.Module):
    """A block for a loop over layers, which also returns something of each."""

    @nn.compact
    def __call__(self, x, _):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        return x, jnp.mean(x)


class Scanned(Tokens):
    """A loop over layers."""

    def mix(self, x):
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers()(x, None)[0]


class Recurrent(Tokens):
    """Loops over places."""

    def mix(self, x):
        return nn.RNN(nn.GRUCell(WIDTH))(nn.RNN(nn.LSTMCell(WIDTH))(x))


class RecurrentLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.RNN(nn.GRUCell(WIDTH))(x), None


class ScannedRecurrent(Tokens):
    """Loops over places in a loop over layers."""

    def mix(self, x):
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(RecurrentLayer, **over, length=2)()(x, None)[0]


class Convolutions(Tokens):
    """Causal convolutions: full, and depthwise with gaps."""

    def mix(self, x):
        x = nn.tanh(nn.Conv(WIDTH, (4,), padding="CAUSAL")(x))
        gaps = {"kernel_dilation": 2, "feature_group_count": WIDTH}
        return x + nn.Conv(WIDTH, (3,), padding="CAUSAL", **gaps)(x)


class Shifts(Tokens):
    """Tokens beside the ones before them, a linear recurrence, and a running sum."""

    def mix(self, x):
        x = x + nn.Dense(WIDTH)(jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])
        x = x + jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        keep, new = nn.sigmoid(nn.Dense(WIDTH)(x)), nn.Dense(WIDTH)(x)

        def after(a, b):
            return a[0] * b[0], a[1] * b[0] + b[1]

        return lax.associative_scan(after, (keep, new), axis=1)[1] + jnp.cumsum(new, 1) / 8


class Merged(Tokens):
    """Rows and places in one dim; a mix of places by a triangle of weights."""

    def mix(self, x):
        flat = nn.tanh(nn.Dense(WIDTH)(x.reshape(-1, WIDTH)))
        weights = self.param("weights", nn.initializers.normal(), (64, 64))
        weights = jnp.tril(weights[: x.shape[1], : x.shape[1]])
        return x + jnp.einsum("ts,bse->bte", weights, flat.reshape(x.shape))


class Switched(Tokens):
    """A branch that nothing but the weights decides."""

    def mix(self, x):
        w = self.param("w", nn.initializers.normal(), (WIDTH, WIDTH))
        return lax.cond(w.sum() > 0, lambda x: jnp.tanh(x @ w), lambda x: x @ w, x)


class Summary(Tokens):
    """A loop over places, and the carry at its end."""

    def mix(self, x):
        first = jnp.zeros((x.shape[0], WIDTH))
        last, out = lax.scan(lambda c, y: (c + y, c + y), first, jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(out, 0, 1) + 0 * last[:, None]
