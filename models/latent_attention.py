"""Latent attention (MLA): keys and values of all heads come from one narrow array.

Shape letters: B batch, L positions, M places of a cache (or L), D width, N heads, H head width, of
which the last R numbers are rotated, C the width of the narrow array, V value width.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from .attention import cached
from .decoder_config import DecoderConfig
from .decoder_layers import Places, dense
from .rotary import Rotary

EPSILON = 1e-6
"""Of the norms of narrow arrays, whatever the config says of the others."""


class LatentAttention(nnx.Module):
    """Causal self-attention. `kernel` mixes the values, like `causal_attention`.

    A cache holds the narrow array and the rotated part of the keys, C + R numbers for each place,
    and not N (H + V); each call makes keys and values of all places from them.
    """

    def __init__(
        self, config: DecoderConfig, kernel: Callable[..., jax.Array], *, rngs: nnx.Rngs
    ) -> None:
        latent = config.latent
        assert latent is not None
        self.kernel, self.latent, self.head_width = kernel, latent, config.head_width
        width, inner = config.width, config.heads * config.head_width
        bias, rank = config.qkv_bias, latent.query_rank
        if rank is None:
            self.q_proj = dense(width, inner, rngs)
        else:
            self.q_a_proj = dense(width, rank, rngs, bias=bias)
            self.q_a_layernorm = nnx.RMSNorm(rank, epsilon=EPSILON, rngs=rngs)
            self.q_b_proj = dense(rank, inner, rngs)
        self.kv_a_proj = dense(width, latent.rank + latent.rotated, rngs, bias=bias)
        self.kv_a_layernorm = nnx.RMSNorm(latent.rank, epsilon=EPSILON, rngs=rngs)
        of_head = config.head_width - latent.rotated + latent.value_width
        self.kv_b_proj = dense(latent.rank, config.heads * of_head, rngs)
        self.o_proj = dense(config.heads * latent.value_width, width, rngs, bias=config.out_bias)
        self.cached_latent: nnx.Cache | None = nnx.data(None)
        self.cached_key: nnx.Cache | None = nnx.data(None)

    def init_cache(self, shape: tuple[int, ...], dtype: Any) -> None:
        """Make an empty cache; `shape` is (B, number of places), after the layers if stacked."""
        self.cached_latent = nnx.Cache(jnp.zeros((*shape, 1, self.latent.rank), dtype))
        self.cached_key = nnx.Cache(jnp.zeros((*shape, 1, self.latent.rotated), dtype))

    def __call__(self, x_BLD: jax.Array, places: Places, rotary: Rotary | None) -> jax.Array:
        batch, length, _ = x_BLD.shape
        first = self.head_width - self.latent.rotated
        q_BLNH = self._queries(x_BLD).reshape(batch, length, -1, self.head_width)
        narrow = named(self.kv_a_proj(x_BLD), "kv_a_proj")[:, :, None, :]
        latent_BM1C, key_BM1R = jnp.split(narrow, [self.latent.rank], axis=-1)
        latent_BM1C = self.kv_a_layernorm(latent_BM1C)
        if rotary is not None and places.rotation is not None:
            pass_BLNH, turned_BLNR = jnp.split(q_BLNH, [first], axis=-1)
            turned_BLNR = rotary.rotate(turned_BLNR, places.rotation)
            q_BLNH = jnp.concatenate([pass_BLNH, turned_BLNR], axis=-1)
            key_BM1R = rotary.rotate(key_BM1R, places.rotation)
        if self.cached_latent is not None and self.cached_key is not None:
            self.cached_latent[...] = cached(self.cached_latent[...], latent_BM1C, places.start)
            self.cached_key[...] = cached(self.cached_key[...], key_BM1R, places.start)
            latent_BM1C = self.cached_latent[...].astype(latent_BM1C.dtype)
            key_BM1R = self.cached_key[...].astype(key_BM1R.dtype)
        wide = named(self.kv_b_proj(latent_BM1C[:, :, 0]), "kv_b_proj")
        of_head = first + self.latent.value_width
        k_BMNH, v_BMNV = jnp.split(wide.reshape(*wide.shape[:2], -1, of_head), [first], axis=-1)
        key_BMNR = jnp.broadcast_to(key_BM1R, (*k_BMNH.shape[:-1], self.latent.rotated))
        out_BLN1V = self.kernel(
            q_BLNH[:, :, :, None],
            jnp.concatenate([k_BMNH, key_BMNR], axis=-1),
            v_BMNV,
            mask_BM=places.mask_BM,
            segments_BM=places.segments_BL,
            start=places.start,
            window=places.window,
        )
        return named(self.o_proj(out_BLN1V.reshape(batch, length, -1)), "o_proj")

    def _queries(self, x_BLD: jax.Array) -> jax.Array:
        if self.latent.query_rank is None:
            return named(self.q_proj(x_BLD), "q_proj")
        narrow = self.q_a_layernorm(named(self.q_a_proj(x_BLD), "q_a_proj"))
        return named(self.q_b_proj(narrow), "q_b_proj")
