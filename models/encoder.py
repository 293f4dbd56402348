"""`Encoder` (flax.nnx): a BERT, which predicts tokens from both sides.

Shape letters: B batch, L positions, D width, V vocabulary, N heads, H head width (D / N), F hidden.
The mathematics is the same as in Hugging Face's BertForMaskedLM, without dropout.
Source: Devlin et al., arXiv 1810.04805.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .decoder_config import Activation
from .decoder_layers import ACTIVATIONS, NORMAL, dense
from .encoder_format import BERT
from .losses import Head, cross_entropy, head_logits, mean_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The shape of an encoder.

    Attributes:
      vocab, layers, width, heads, hidden: V, the number of blocks, D, N, F.
      length: the number of learned positions; longer sequences are an error.
      token_types: the number of kinds of tokens, such as first and second sentence.
      eps: the number added to the variance in every norm.
      activation: the perceptrons' function.
      source: the text of the config.json that the model was built from; None if from none.
    """

    vocab: int
    layers: int
    width: int
    heads: int
    hidden: int
    length: int = 512
    token_types: int = 2
    eps: float = 1e-12
    activation: Activation = "gelu"
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads; change one of them"
            )


class Encoder(nnx.Module):
    """A masked language model whose tokens see each other in both directions.

    Parameters: `embed_tokens/embedding` [V, D], `embed_positions/embedding`,
    `embed_types/embedding`, `embed_norm`, blocks, and of the head `head_dense`, `head_norm` and
    `head_bias` [V]; its product is with the embedding of tokens. A block has
    `self_attn/{q,k,v,o}_proj`, `self_attn_norm`, `mlp/{up,down}_proj` and `mlp_norm`. The blocks
    are `layers/0`, ...; with scan there is one `layers` whose leaves have a leading layer dim.
    """

    hugging_face = BERT

    def __init__(
        self,
        config: EncoderConfig,
        *,
        scan: bool = True,
        remat: bool | Callable[..., Any] = False,
        rngs: nnx.Rngs,
    ) -> None:
        """Build the model with normal(0.02) kernels and embeddings.

        Args:
          config: its shape.
          scan, remat: as for `Decoder`.
          rngs: random numbers; the stream "params" is used.
        """
        self.config, self.scan, self.remat = config, scan, remat
        self.vocab, self.length = config.vocab, config.length

        def embed(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, config.width, embedding_init=NORMAL, rngs=rngs)

        self.embed_tokens = embed(config.vocab)
        self.embed_positions = embed(config.length)
        self.embed_types = embed(config.token_types)
        self.embed_norm = _norm(config, rngs)
        self.layers: Any
        if scan:
            self.layers = nnx.vmap(lambda rngs: EncoderBlock(config, rngs=rngs))(
                rngs.split(config.layers)
            )
        else:
            self.layers = nnx.List(EncoderBlock(config, rngs=rngs) for _ in range(config.layers))
        self.head_dense = dense(config.width, config.width, rngs, bias=True)
        self.head_norm = _norm(config, rngs)
        self.head_bias = nnx.Param(jnp.zeros(config.vocab))

    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        mask_BL: jax.Array | None = None,
        types_BL: jax.Array | None = None,
    ) -> jax.Array:
        """Return the logits of each position's own token, float32[B, L, V].

        Args:
          tokens_BL: int[B, L].
          mask_BL: nonzero at real tokens, 0 at padding. None means that all tokens are real.
          types_BL: int[B, L], the kind of each token; None means 0.

        Raises:
          ValueError: L is above `length`.
        """
        config, length = self.config, tokens_BL.shape[1]
        if length > config.length:
            raise ValueError(
                f"sequence of {length} tokens, but the model has {config.length} positions; cut "
                "the sequence, or take a model with more"
            )
        types_BL = jnp.zeros_like(tokens_BL) if types_BL is None else types_BL
        x_BLD = jnp.take(self.embed_tokens.embedding[...], tokens_BL, axis=0)
        x_BLD += self.embed_positions.embedding[...][:length]
        x_BLD += jnp.take(self.embed_types.embedding[...], types_BL, axis=0)
        x_BLD = self.embed_norm(x_BLD)

        def run(x_BLD: jax.Array, block: Any) -> jax.Array:
            return block(x_BLD, mask_BL)

        if self.remat:
            policy = None if self.remat is True else self.remat
            run = nnx.remat(run, prevent_cse=not self.scan, policy=policy, graph_updates=False)
        if self.scan:
            x_BLD = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BLD, self.layers)
        else:
            for block in self.layers:
                x_BLD = run(x_BLD, block)
        x_BLD = self.head_norm(ACTIVATIONS[config.activation](self.head_dense(x_BLD)))
        return head_logits(x_BLD, Head(self.embed_tokens.embedding[...], self.head_bias[...]))

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (mean cross-entropy in nats, metrics) for {"tokens", "targets": int32[B, L]}.

        The batch may hold "mask" [B, L], nonzero at the targets that count, such as those of masked
        tokens; "real" [B, L], 0 at padding; and "types" [B, L]. Nothing here depends on `train`,
        because the model has no dropout.
        """
        logits_BLV = self(batch["tokens"], mask_BL=batch.get("real"), types_BL=batch.get("types"))
        return mean_loss(cross_entropy(logits_BLV, batch["targets"]), batch)


class EncoderBlock(nnx.Module):
    """norm(x + attention(x)), then norm(x + perceptron(x))."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs) -> None:
        self.activate = ACTIVATIONS[config.activation]
        self.self_attn = BothWaysAttention(config.width, config.heads, rngs=rngs)
        self.self_attn_norm = _norm(config, rngs)
        self.mlp = nnx.Dict(
            up_proj=dense(config.width, config.hidden, rngs, bias=True),
            down_proj=dense(config.hidden, config.width, rngs, bias=True),
        )
        self.mlp_norm = _norm(config, rngs)

    def __call__(self, x_BLD: jax.Array, mask_BL: jax.Array | None) -> jax.Array:
        x_BLD = self.self_attn_norm(x_BLD + self.self_attn(x_BLD, mask_BL))
        hidden_BLF = self.activate(self.mlp.up_proj(x_BLD))
        return self.mlp_norm(x_BLD + self.mlp.down_proj(hidden_BLF))


class BothWaysAttention(nnx.Module):
    """Self-attention in which each token sees all that are no padding."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            dense(width, width, rngs, bias=True) for _ in range(4)
        )

    def __call__(self, x_BLD: jax.Array, mask_BL: jax.Array | None) -> jax.Array:
        batch, length, width = x_BLD.shape
        q, k, v = (
            product(x_BLD).reshape(batch, length, self.heads, -1)
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = None if mask_BL is None else (mask_BL != 0)[:, None, None, :]
        out_BLNH = jax.nn.dot_product_attention(q, k, v, mask=seen)
        return self.o_proj(out_BLNH.reshape(batch, length, width))


def _norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, epsilon=config.eps, use_fast_variance=False, rngs=rngs)
