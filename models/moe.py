"""Mixtral (flax.nnx): Llama with a mixture of SwiGLU experts in place of each perceptron.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads, F
hidden units of an expert, E experts. `moe_layers.py` has the experts and its own letters. The
mathematics is the same as in Hugging Face's MixtralForCausalLM, without a sliding window.
Source: Jiang et al., arXiv 2401.04088.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from .attention import BLOCK, Backend, causal_attention
from .decoder import Decoder
from .head_losses import head_statistics
from .llama_layers import Attention
from .losses import mean_loss
from .moe_layers import MoEBlock, Routing, make_mix
from .rotary import RopeScaling


class Mixtral(Decoder):
    """A language model of experts. Presets return `lambda rngs: Mixtral(...)`, which allocates
    nothing.

    Parameters: `embed_tokens/embedding` [V, D], blocks, `norm/scale` [D], and, if untied, `lm_head`
    [V, D]. A block has `input_layernorm`, `self_attn/{q,k,v,o}_proj`, `post_attention_layernorm`,
    `router/kernel` [D, E], `experts/gate_proj` and `experts/up_proj` [E, D, F], and
    `experts/down_proj` [E, F, D]. The blocks are `layers/0`, `layers/1`, ...; with scan there is
    one `layers` whose leaves have a leading layer dim.
    """

    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        experts: int = 8,
        top_k: int = 2,
        routing: Routing = "capacity",
        capacity_factor: float = 1.25,
        balance: float = 0.01,
        theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | RopeScaling | None = None,
        length: int = 2048,
        eps: float = 1e-5,
        tie: bool = False,
        scan: bool = True,
        remat: bool | Callable[..., Any] = False,
        attention: Backend = "auto",
        attention_block: int = BLOCK,
        loss_chunk: int = 512,
        rngs: nnx.Rngs,
    ):
        """Build the model with normal(0.02) kernels.

        Args:
          vocab, layers, width, heads, kv_heads, theta, rope_scaling, length, eps, tie, scan, remat,
            attention, attention_block, loss_chunk, rngs: as for `Llama`.
          hidden: F, the hidden units of each expert.
          experts: E.
          top_k: the number of experts of each token. Their outputs are weighted by the softmax of
            their logits, in float32.
          routing: how tokens come to their experts. "capacity" gives each expert a fixed number of
            places in each row of the batch, by products with one-hot arrays, whose memory grows
            with the square of the length; tokens that come late in a row may find no place.
            "ragged" sorts the tokens by expert and drops none. "dense" lets every expert compute
            every token, for reference.
          capacity_factor: for "capacity": an expert has ceil(capacity_factor * top_k * L / E)
            places in a row of L tokens.
          balance: the factor of the load-balancing loss; see `balance_loss`.

        Raises:
          ValueError: `heads` or `kv_heads` do not divide as attention needs, the scaling or the
            routing is unknown, `top_k` is not from 1 to `experts`, or `capacity_factor` is not
            above 0.
        """
        if not 1 <= top_k <= experts:
            raise ValueError(
                f"top_k={top_k}, experts={experts}: a token takes from 1 to {experts} experts; "
                "lower top_k or raise experts"
            )
        mix = make_mix(routing, capacity_factor)
        kernel = functools.partial(causal_attention, backend=attention, block=attention_block)

        def block(rngs: nnx.Rngs) -> MoEBlock:
            shape = {"width": width, "hidden": hidden, "experts": experts, "top_k": top_k}
            attend = Attention(width, heads, kv_heads, kernel, rngs=rngs)
            return MoEBlock(attend, mix, **shape, eps=eps, rngs=rngs)

        super().__init__(
            block,
            vocab=vocab,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            theta=theta,
            rope_scaling=rope_scaling,
            length=length,
            eps=eps,
            tie=tie,
            scan=scan,
            remat=remat,
            loss_chunk=loss_chunk,
            rngs=rngs,
        )
        self.hidden, self.experts, self.top_k = hidden, experts, top_k
        self.routing, self.capacity_factor, self.balance = routing, capacity_factor, balance

    @classmethod
    def tiny(cls, **overrides: Any) -> "Callable[[nnx.Rngs], Mixtral]":
        """A model for tests, with a query group of 2 and 8 experts: 35,488 parameters."""
        shape = {"vocab": 64, "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 16}
        return lambda rngs: cls(**{**shape, **overrides}, rngs=rngs)

    @classmethod
    def mixtral_8x7b(cls, **overrides: Any) -> "Callable[[nnx.Rngs], Mixtral]":
        """Mixtral 8x7B: 46,702,792,704 parameters. A token uses 12,879,925,248 of them."""
        shape = {"vocab": 32000, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8}
        shape = {**shape, "hidden": 14336, "theta": 1e6, "length": 32768}
        return lambda rngs: cls(**{**shape, **overrides}, rngs=rngs)

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (loss, metrics) for {"tokens": int32[B, length + 1]}.

        The loss is the mean cross-entropy in nats plus `balance` times the balancing loss, which is
        the mean over the layers and comes back as metrics["balance"]. With routing by capacity,
        metrics["dropped"] is the share of the pairs of token and expert that found no place.
        The batch may hold "mask" [B, length], nonzero at the targets that count; see
        `next_token_loss`. The balancing loss counts all tokens. Nothing here depends on `train`,
        because the model has no dropout.
        """
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x_BLD, statistics = self.trunk(tokens_BL)
        losses_BL = head_statistics(x_BLD, self.head_VD, targets_BL, self.loss_chunk)[0]
        loss, metrics = mean_loss(losses_BL, batch)
        of_layers = {name: scalars.mean() for name, scalars in statistics.items()}
        return loss + self.balance * of_layers["balance"], {**metrics, **of_layers}
