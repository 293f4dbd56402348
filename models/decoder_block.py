"""A block of a decoder: attention and a perceptron, or experts, with their norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .decoder_config import DecoderConfig
from .decoder_layers import Attention, Perceptron, Places, dense, norm
from .latent_attention import LatentAttention
from .moe_layers import Experts, balance_loss, make_mix, route, route_by_sigmoid
from .rotary import Rotary


class Block(nnx.Module):
    """A block; `DecoderConfig.arrangement` says how its parts are added up."""

    def __init__(
        self, config: DecoderConfig, layer: int, kernel: Callable[..., jax.Array], *, rngs: nnx.Rngs
    ) -> None:
        """Build a block.

        Args:
          config: the model's config.
          layer: the number of the block.
          kernel: mixes values, like `causal_attention`.
          rngs: random numbers.
        """
        self.config = config
        if config.arrangement != "norms_after":
            self.input_layernorm = norm(config, rngs)
        attention = Attention if config.latent is None else LatentAttention
        self.self_attn = attention(config, kernel, rngs=rngs)
        if config.arrangement != "parallel_one_norm":
            self.post_attention_layernorm = norm(config, rngs)
        if config.arrangement == "sandwich":
            self.pre_feedforward_layernorm = norm(config, rngs)
        if config.arrangement in ("sandwich", "norms_after"):
            self.post_feedforward_layernorm = norm(config, rngs)
        self.has_experts = config.has_experts(layer)
        if self.has_experts:
            experts = config.experts
            assert experts is not None
            self.router = dense(config.width, experts.count, rngs, bias=experts.bias)
            self.experts = Experts(
                *(experts.count, config.width, experts.hidden),
                bias=experts.bias,
                clamp=experts.clamp,
                rngs=rngs,
            )
            shared = experts.shared_hidden
            self.shared_expert: Perceptron | None = nnx.data(
                None if shared is None else Perceptron(config, shared, rngs=rngs)
            )
            correction = nnx.Param(jnp.zeros(experts.count)) if experts.correction else None
            self.score_correction: nnx.Param | None = nnx.data(correction)
        else:
            self.mlp = Perceptron(config, rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, places: Places, rotary: Rotary | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the activations after the block, and its statistics: a dict of scalars."""
        arrangement, scaled = self.config.arrangement, self._scaled
        if arrangement == "norms_after":
            attended_BLD = self.self_attn(x_BLD, places, rotary)
            x_BLD = x_BLD + scaled(self.post_attention_layernorm(attended_BLD))
            mixed_BLD, statistics = self._feed_forward(x_BLD, places)
            return x_BLD + scaled(self.post_feedforward_layernorm(mixed_BLD)), statistics
        first_BLD = self.input_layernorm(x_BLD)
        attended_BLD = self.self_attn(first_BLD, places, rotary)
        if arrangement in ("parallel", "parallel_one_norm"):
            one = arrangement == "parallel_one_norm"
            second_BLD = first_BLD if one else self.post_attention_layernorm(x_BLD)
            mixed_BLD, statistics = self._feed_forward(second_BLD, places)
            return x_BLD + scaled(attended_BLD) + scaled(mixed_BLD), statistics
        if arrangement == "sandwich":
            x_BLD = x_BLD + scaled(self.post_attention_layernorm(attended_BLD))
            mixed_BLD, statistics = self._feed_forward(
                self.pre_feedforward_layernorm(x_BLD), places
            )
            return x_BLD + scaled(self.post_feedforward_layernorm(mixed_BLD)), statistics
        x_BLD = x_BLD + scaled(attended_BLD)
        mixed_BLD, statistics = self._feed_forward(self.post_attention_layernorm(x_BLD), places)
        return x_BLD + scaled(mixed_BLD), statistics

    def _scaled(self, x_BLD: jax.Array) -> jax.Array:
        scale = self.config.residual_scale
        return x_BLD if scale is None else x_BLD * scale

    def _feed_forward(self, x_BLD: jax.Array, places: Places) -> tuple[jax.Array, dict[str, Any]]:
        if not self.has_experts:
            return self.mlp(x_BLD), {}
        real_BL = places.mask_BM
        if real_BL is not None:  # with a cache, the mask covers all its places
            length = x_BLD.shape[1]
            real_BL = jax.lax.dynamic_slice_in_dim(real_BL, places.start, length, axis=1)
        return self.mixture(x_BLD, real_BL)

    def mixture(
        self, x_BLD: jax.Array, real_BL: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the mixed outputs of the experts, and "balance" and, by capacity, "dropped".

        Args:
          x_BLD: the tokens.
          real_BL: nonzero at real tokens, 0 at padding. None means that all tokens are real. The
            balancing loss counts padding too.
        """
        experts = self.config.experts
        assert experts is not None
        mix = make_mix(experts.routing, experts.capacity_factor)
        kernel_DE = self.router.kernel[...]
        if experts.scores == "sigmoid":
            correction = self.score_correction
            routes = route_by_sigmoid(
                *(x_BLD, kernel_DE, experts.top_k),
                correction_E=None if correction is None else correction[...],
                groups=experts.groups,
                top_groups=experts.top_groups,
                is_normalized=experts.is_normalized,
            )
        else:
            bias_E = None if self.router.bias is None else self.router.bias[...]
            routes = route(
                x_BLD, kernel_DE, experts.top_k, is_normalized=experts.is_normalized, bias_E=bias_E
            )
        if experts.scale != 1:
            scaled = routes.weights_BLK * experts.scale
            routes = dataclasses.replace(routes, weights_BLK=scaled)
        y_BLD, statistics = mix(x_BLD, self.experts, routes, real_BL)
        if self.shared_expert is not None:
            y_BLD = y_BLD + self.shared_expert(x_BLD)
        return y_BLD, {"balance": balance_loss(routes), **statistics}
