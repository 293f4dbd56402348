"""The layers of GPT-2, as modules of flax.linen; see `gpt.py` for the shape letters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from .attention import BLOCK, Backend, Dropout, cached, causal_attention


class Block(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)); the second result is scan's empty y."""

    heads: int
    hidden: int
    layers: int
    """The model's number of blocks. Residual projections start smaller by 1/sqrt(2 layers)."""
    dropout: float
    train: bool
    decode: bool = False
    backend: Backend = "auto"
    attention_block: int = BLOCK

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        mask_BL: jax.Array | None = None,
        start: jax.Array | int = 0,
        segments_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        small = 0.02 / (2 * self.layers) ** 0.5
        attention = Attention(
            self.heads,
            small,
            self.dropout if self.train else 0.0,
            self.decode,
            self.backend,
            self.attention_block,
            name="attn",
        )
        perceptron = Perceptron(self.hidden, small, name="mlp")
        drop = nn.Dropout(self.dropout, deterministic=not self.train)
        x_BLD = x_BLD + drop(attention(layer_norm("ln_1")(x_BLD), mask_BL, start, segments_BL))
        x_BLD = x_BLD + drop(perceptron(layer_norm("ln_2")(x_BLD)))
        return x_BLD, None


class Attention(nn.Module):
    """Causal self-attention with one product for queries, keys and values."""

    heads: int
    projection_std: float
    dropout: float
    decode: bool
    backend: Backend
    block: int

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        mask_BL: jax.Array | None,
        start: jax.Array | int,
        segments_BL: jax.Array | None,
    ) -> jax.Array:
        batch, length, width = x_BLD.shape
        qkv_BLE = dense(3 * width, 0.02, "c_attn")(x_BLD)
        q_BLNH, k_BLNH, v_BLNH = (
            part.reshape(batch, length, self.heads, -1) for part in jnp.split(qkv_BLE, 3, axis=-1)
        )
        if self.decode:
            reads_cache = self.has_variable("cache", "cached_key")
            keys = self.variable("cache", "cached_key", jnp.zeros_like, k_BLNH)
            values = self.variable("cache", "cached_value", jnp.zeros_like, v_BLNH)
            if reads_cache:
                keys.value = cached(keys.value, k_BLNH, start)
                values.value = cached(values.value, v_BLNH, start)
                k_BLNH, v_BLNH = (x.value.astype(v_BLNH.dtype) for x in (keys, values))
        dropout = Dropout(self.dropout, self.make_rng("dropout")) if self.dropout else None
        # Each query head has a key-value head of its own: groups of one.
        out = causal_attention(
            q_BLNH[:, :, :, None, :],
            k_BLNH,
            v_BLNH,
            mask_BM=mask_BL,
            segments_BM=segments_BL,
            start=start,
            dropout=dropout,
            # Parameters are made in float32, which cuDNN does not take.
            backend="auto" if self.is_initializing() else self.backend,
            block=self.block,
        )
        return dense(width, self.projection_std, "c_proj")(out.reshape(batch, length, width))


class Perceptron(nn.Module):
    """dense, tanh-GELU, dense."""

    hidden: int
    projection_std: float

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        h_BLF = nn.gelu(dense(self.hidden, 0.02, "c_fc")(x_BLD), approximate=True)
        return dense(x_BLD.shape[-1], self.projection_std, "c_proj")(h_BLF)


def dense(features: int, std: float, name: str) -> nn.Dense:
    """Return a dense layer with normal(std) kernel and zero bias."""
    return nn.Dense(features, kernel_init=nn.initializers.normal(std), name=name)


def layer_norm(name: str) -> nn.LayerNorm:
    """Return GPT-2's LayerNorm: eps 1e-5, statistics in float32.

    The variance is mean((x - mean)^2), because E[x^2] - E[x]^2 cancels if the mean is large.
    """
    return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)
