"""Mixtral (flax.nnx): Llama with a mixture of SwiGLU experts in place of each perceptron.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads, F
hidden units of an expert, E experts. `moe_layers.py` has the experts and its own letters. The
mathematics is the same as in Hugging Face's MixtralForCausalLM, without a sliding window.
Source: Jiang et al., arXiv 2401.04088.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from .attention import BLOCK, Backend
from .decoder import Decoder
from .decoder_config import DecoderConfig, ExpertsConfig
from .llama import check_heads
from .moe_layers import Routing, make_mix
from .rope_scaling import RopeScaling
from .rotary import Rotary


class Mixtral(Decoder):
    """A language model of experts. Presets return `lambda rngs: Mixtral(...)`, which allocates
    nothing.

    Its parameters are those of `Decoder`.
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
        scaling = RopeScaling.of(rope_scaling)
        head_width = check_heads(width, heads, kv_heads, None)
        make_mix(routing, capacity_factor)  # fails here if they are unknown
        config = DecoderConfig(
            vocab=vocab,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            hidden=hidden,
            length=length,
            eps=eps,
            rotary=Rotary(theta=theta, scaling=scaling, width=head_width),
            experts=ExpertsConfig(
                count=experts,
                top_k=top_k,
                hidden=hidden,
                routing=routing,
                capacity_factor=capacity_factor,
                balance=balance,
            ),
            tie=tie,
        )
        super().__init__(
            config,
            scan=scan,
            remat=remat,
            attention=attention,
            attention_block=attention_block,
            loss_chunk=loss_chunk,
            rngs=rngs,
        )

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
