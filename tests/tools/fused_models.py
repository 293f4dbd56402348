"""Language models whose projections are fused: of queries, keys and values, and of state spaces."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from tools.no_cache_models import WIDTH, Tokens


def _rotated(x, half):
    """Turn the first `2 * half` numbers of each head; the others stay."""
    angle = jnp.arange(x.shape[1])[:, None, None] / 10 ** (jnp.arange(half) / half)
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    turned = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.concatenate([*turned, rest], axis=-1)


class FusedBlocks(Tokens):
    """Queries, keys and values of grouped heads in one matrix, gates and values of the hidden layer
    in another; attention and hidden layer beside each other, joined by one product."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    hidden: int = 24

    def mix(self, x):
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        for _ in range(2):
            h = nn.LayerNorm()(x)
            wide = nn.Dense((heads + 2 * kv_heads) * size)(h)
            q, k, v = jnp.split(wide, [heads * size, (heads + kv_heads) * size], axis=-1)
            q, k, v = (y.reshape(*y.shape[:2], -1, size) for y in (q, k, v))
            mixed = jax.nn.dot_product_attention(
                _rotated(q, 2), _rotated(k, 2), v, is_causal=True, implementation="xla"
            )
            gate, value = jnp.split(nn.Dense(2 * self.hidden)(h), 2, axis=-1)
            both = [mixed.reshape(*x.shape[:2], -1), nn.silu(gate) * value]
            x = x + nn.Dense(WIDTH)(jnp.concatenate(both, axis=-1))
        return nn.LayerNorm()(x)


class StateSpaces(Tokens):
    """Selective state spaces (Mamba, arXiv 2312.00752): a causal convolution of each channel, and a
    linear recurrence whose steps depend on the tokens."""

    inner: int = 32
    state: int = 4
    rank: int = 2

    def mix(self, x):
        for i in range(2):
            gate, h = jnp.split(nn.Dense(2 * self.inner)(nn.LayerNorm()(x)), 2, axis=-1)
            conv = nn.Conv(self.inner, (4,), padding="CAUSAL", feature_group_count=self.inner)
            h = nn.silu(conv(h))
            cuts = [self.rank, self.rank + self.state]
            low, write, read = jnp.split(nn.Dense(cuts[-1] + self.state)(h), cuts, axis=-1)
            step = nn.softplus(nn.Dense(self.inner)(low))[..., None]
            ones = nn.initializers.ones
            decay = -jnp.exp(self.param(f"decay_{i}", ones, (self.inner, self.state)))
            held = _recurrence(jnp.exp(step * decay), step * h[..., None] * write[:, :, None])
            y = (held * read[:, :, None]).sum(-1) + self.param(f"skip_{i}", ones, self.inner) * h
            x = x + nn.Dense(WIDTH)(y * nn.silu(gate))
        return nn.LayerNorm()(x)


def _recurrence(keep, new):
    def after(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(after, (keep, new), axis=1)[1]


class Branches(Tokens):
    """A branch that the weights decide, and a function with its own derivative."""

    def mix(self, x):
        hidden = 4 * WIDTH
        up = self.param("up", nn.initializers.lecun_normal(), (WIDTH, hidden))
        down = self.param("down", nn.initializers.lecun_normal(), (hidden, WIDTH))
        share = self.param("share", nn.initializers.ones, ())
        h = lax.cond(share > 0, jnp.tanh, lambda h: h * share, x @ up)
        return x + _clipped(h) @ down


@jax.custom_vjp
def _clipped(x):
    return jnp.clip(x, -1, 1)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, g: (g,))
