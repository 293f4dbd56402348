"""The layers of a Llama block, as modules of flax.nnx; see `llama.py` for the shape letters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from .attention import cached
from .rotary import rotate

NORMAL = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        eps: float,
        kernel: Callable[..., jax.Array],
        *,
        rngs: nnx.Rngs,
    ):
        self.input_layernorm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.self_attn = Attention(width, heads, kv_heads, kernel, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.mlp = SwiGLU(width, hidden, rngs=rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        mask_BL: jax.Array | None,
        start: jax.Array | int,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the activations after the block, and no statistics; see `Decoder`."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotation, mask_BL, start)
        return x_BLD + self.mlp(self.post_attention_layernorm(x_BLD)), {}


class Attention(nnx.Module):
    """Rotary causal self-attention; N / K query heads share a key-value head. `kernel` mixes the
    values, like `causal_attention`."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        kernel: Callable[..., jax.Array],
        *,
        rngs: nnx.Rngs,
    ):
        self.kernel = kernel
        self.kv_heads = kv_heads
        self.head_width = width // heads
        self.q_proj = dense(width, width, rngs)
        self.k_proj = dense(width, kv_heads * self.head_width, rngs)
        self.v_proj = dense(width, kv_heads * self.head_width, rngs)
        self.o_proj = dense(width, width, rngs)
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)

    def init_cache(self, shape: tuple[int, ...], dtype: Any) -> None:
        """Make an empty cache; `shape` is (B, number of places), after the layers if stacked."""
        empty = jnp.zeros((*shape, self.kv_heads, self.head_width), dtype)
        self.cached_key, self.cached_value = nnx.Cache(empty), nnx.Cache(empty)

    def __call__(
        self,
        x_BLD: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        mask_BL: jax.Array | None,
        start: jax.Array | int,
    ) -> jax.Array:
        batch, length, width = x_BLD.shape

        def split(y: jax.Array) -> jax.Array:
            return y.reshape(batch, length, -1, self.head_width)

        q_BLNH = rotate(split(named(self.q_proj(x_BLD), "q_proj")), rotation)
        k_BLKH = rotate(split(named(self.k_proj(x_BLD), "k_proj")), rotation)
        v_BLKH = split(named(self.v_proj(x_BLD), "v_proj"))
        if self.cached_key is not None and self.cached_value is not None:
            self.cached_key[...] = cached(self.cached_key[...], k_BLKH, start)
            self.cached_value[...] = cached(self.cached_value[...], v_BLKH, start)
            k_BLKH = self.cached_key[...].astype(k_BLKH.dtype)
            v_BLKH = self.cached_value[...].astype(v_BLKH.dtype)
        q_BLKGH = q_BLNH.reshape(batch, length, self.kv_heads, -1, self.head_width)
        out = self.kernel(q_BLKGH, k_BLKH, v_BLKH, mask_BM=mask_BL, start=start)
        return named(self.o_proj(out.reshape(batch, length, width)), "o_proj")


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.gate_proj = dense(width, hidden, rngs)
        self.up_proj = dense(width, hidden, rngs)
        self.down_proj = dense(hidden, width, rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        gate_BLF = named(self.gate_proj(x_BLD), "gate_proj")
        up_BLF = named(self.up_proj(x_BLD), "up_proj")
        return named(self.down_proj(jax.nn.silu(gate_BLF) * up_BLF), "down_proj")


def dense(num_in: int, num_out: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer without bias, kernel [in, out] from normal(0.02)."""
    return nnx.Linear(num_in, num_out, use_bias=False, kernel_init=NORMAL, rngs=rngs)
