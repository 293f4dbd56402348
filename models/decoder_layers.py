"""The layers of a decoder's block, as modules of flax.nnx; `decoder.py` has the shape letters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from .attention import cached
from .decoder_config import Activation, DecoderConfig
from .rotary import Rotary, Rotation

NORMAL = nnx.initializers.normal(0.02)

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Places(NamedTuple):
    """Where the tokens of a call stand, and what they see.

    Attributes:
      rotation: cos and sin; None if positions are not rotary.
      mask_BM: nonzero at real tokens; with a cache, one for each of its places.
      segments_BL: the number of each token's document; None for one document a row.
      start: the first token's place in the cache; 0 without one.
      window: how many positions a query sees; None for all.
      slopes_KG: what scores lose with distance; None for nothing.
    """

    rotation: Rotation | None
    mask_BM: jax.Array | None
    segments_BL: jax.Array | None
    start: jax.Array | int
    window: jax.Array | int | None
    slopes_KG: jax.Array | None


class Attention(nnx.Module):
    """Causal self-attention; N / K query heads share a key-value head. `kernel` mixes the values,
    like `causal_attention`."""

    def __init__(
        self, config: DecoderConfig, kernel: Callable[..., jax.Array], *, rngs: nnx.Rngs
    ) -> None:
        self.kernel = kernel
        self.kv_heads, self.head_width = config.kv_heads, config.head_width
        width, bias = config.width, config.qkv_bias
        inner, shared = (n * config.head_width for n in (config.heads, config.kv_heads))
        self.q_proj = dense(width, inner, rngs, bias=bias)
        self.k_proj = dense(width, shared, rngs, bias=bias)
        self.v_proj = dense(width, shared, rngs, bias=bias)
        self.o_proj = dense(inner, width, rngs, bias=config.out_bias)
        self.is_normed_whole = config.qk_norm == "all"
        norms = (qk_norm(config, heads, rngs) for heads in (config.heads, config.kv_heads))
        self.q_norm, self.k_norm = map(nnx.data, norms)
        sinks = nnx.Param(NORMAL(rngs.params(), (config.heads,))) if config.sinks else None
        self.sinks: nnx.Param | None = nnx.data(sinks)
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)

    def init_cache(self, shape: tuple[int, ...], dtype: Any) -> None:
        """Make an empty cache; `shape` is (B, number of places), after the layers if stacked."""
        empty = jnp.zeros((*shape, self.kv_heads, self.head_width), dtype)
        self.cached_key, self.cached_value = nnx.Cache(empty), nnx.Cache(empty)

    def __call__(self, x_BLD: jax.Array, places: Places, rotary: Rotary | None) -> jax.Array:
        batch, length, _ = x_BLD.shape

        def split(y: jax.Array, norm: Callable[[jax.Array], jax.Array] | None) -> jax.Array:
            if norm is not None and self.is_normed_whole:
                y = norm(y)
            y = y.reshape(batch, length, -1, self.head_width)
            return y if norm is None or self.is_normed_whole else norm(y)

        q_BLNH = split(named(self.q_proj(x_BLD), "q_proj"), self.q_norm)
        k_BLKH = split(named(self.k_proj(x_BLD), "k_proj"), self.k_norm)
        v_BLKH = split(named(self.v_proj(x_BLD), "v_proj"), None)
        if rotary is not None and places.rotation is not None:
            q_BLNH, k_BLKH = (rotary.rotate(x, places.rotation) for x in (q_BLNH, k_BLKH))
        if self.cached_key is not None and self.cached_value is not None:
            self.cached_key[...] = cached(self.cached_key[...], k_BLKH, places.start)
            self.cached_value[...] = cached(self.cached_value[...], v_BLKH, places.start)
            k_BLKH = self.cached_key[...].astype(k_BLKH.dtype)
            v_BLKH = self.cached_value[...].astype(v_BLKH.dtype)
        sinks_KG = None if self.sinks is None else self.sinks[...].reshape(self.kv_heads, -1)
        out_BLKGH = self.kernel(
            q_BLNH.reshape(batch, length, self.kv_heads, -1, self.head_width),
            k_BLKH,
            v_BLKH,
            mask_BM=places.mask_BM,
            segments_BM=places.segments_BL,
            start=places.start,
            window=places.window,
            slopes_KG=places.slopes_KG,
            sinks_KG=sinks_KG,
        )
        return named(self.o_proj(out_BLKGH.reshape(batch, length, -1)), "o_proj")


class Perceptron(nnx.Module):
    """down(activation(gate x) * up x), or without a gate down(activation(up x))."""

    def __init__(self, config: DecoderConfig, hidden: int | None = None, *, rngs: nnx.Rngs) -> None:
        self.activate = ACTIVATIONS[config.activation]
        width, hidden, bias = config.width, hidden or config.hidden, config.mlp_bias
        gate = dense(width, hidden, rngs, bias=bias) if config.is_gated else None
        self.gate_proj: nnx.Linear | None = nnx.data(gate)
        self.up_proj = dense(width, hidden, rngs, bias=bias)
        self.down_proj = dense(hidden, width, rngs, bias=bias)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        if self.gate_proj is None:
            hidden_BLF = self.activate(named(self.up_proj(x_BLD), "up_proj"))
        else:
            gate_BLF = named(self.gate_proj(x_BLD), "gate_proj")
            hidden_BLF = self.activate(gate_BLF) * named(self.up_proj(x_BLD), "up_proj")
        return named(self.down_proj(hidden_BLF), "down_proj")


class PlusOneRMSNorm(nnx.Module):
    """RMSNorm whose scale is 1 + the leaf `scale`, in float32; the result has x's dtype."""

    def __init__(self, width: int, *, epsilon: float, rngs: nnx.Rngs) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        root = jnp.sqrt((wide**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return (wide / root * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class HeadNorms(nnx.Module):
    """LayerNorm of each head, without bias, each with a scale of its own: [heads, H], float32."""

    def __init__(self, heads: int, width: int, *, epsilon: float) -> None:
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((heads, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        root = jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return (centred / root * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def qk_norm(config: DecoderConfig, heads: int, rngs: nnx.Rngs) -> Any:
    """Return the norm of so many heads of queries or keys; None if the config has none."""
    if config.qk_norm is None:
        return None
    if config.qk_norm == "heads":
        return HeadNorms(heads, config.head_width, epsilon=config.eps)
    return norm(config, rngs, config.head_width * (heads if config.qk_norm == "all" else 1))


def norm(
    config: DecoderConfig, rngs: nnx.Rngs, width: int | None = None
) -> nnx.RMSNorm | nnx.LayerNorm | PlusOneRMSNorm:
    """Return a norm of a config's kind, over the model's width or another one."""
    width = width or config.width
    if config.norm == "rms":
        return nnx.RMSNorm(width, epsilon=config.eps, rngs=rngs)
    if config.norm == "rms_plus_one":
        return PlusOneRMSNorm(width, epsilon=config.eps, rngs=rngs)
    # The variance is mean((x - mean)^2), because E[x^2] - E[x]^2 cancels if the mean is large.
    bias = config.norm == "layer"
    return nnx.LayerNorm(
        width, epsilon=config.eps, use_bias=bias, use_fast_variance=False, rngs=rngs
    )


def dense(num_in: int, num_out: int, rngs: nnx.Rngs, *, bias: bool = False) -> nnx.Linear:
    """Return a linear layer, kernel [in, out] from normal(0.02), bias of zeros if it has one."""
    return nnx.Linear(num_in, num_out, use_bias=bias, kernel_init=NORMAL, rngs=rngs)


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the slopes of ALiBi, float32[heads]: powers of 2^(-8 / n) for the largest power of two
    n up to `heads`; heads beyond n take every second one for 2 n."""

    def powers(count: int, num: int, step: int) -> list[float]:
        return [2.0 ** (-8.0 * i / count) for i in range(1, 1 + step * num, step)]

    whole = 2 ** math.floor(math.log2(heads))
    return np.array(powers(whole, whole, 1) + powers(2 * whole, heads - whole, 2), np.float32)
