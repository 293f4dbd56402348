"""Llama (flax.nnx): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads,
G = N / K, H head width, F hidden. The parameter names and the mathematics are the same as in
Hugging Face's LlamaForCausalLM. Its weights are [out, in]; the kernels here are [in, out].
Source: Touvron et al., arXiv 2302.13971 and 2307.09288.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from .attention import BLOCK, Backend
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .llama_format import FORMAT
from .rope_scaling import RopeScaling
from .rotary import Rotary


class Llama(Decoder):
    """A Llama language model. Presets return `lambda rngs: Llama(...)`, which allocates nothing.

    Its parameters are those of `Decoder`.
    """

    hugging_face = FORMAT

    def __init__(
        self,
        *,
        vocab: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | RopeScaling | None = None,
        length: int = 2048,
        eps: float = 1e-5,
        tie: bool = False,
        head_width: int | None = None,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        scan: bool = True,
        remat: bool | Callable[..., Any] = False,
        attention: Backend = "auto",
        attention_block: int = BLOCK,
        loss_chunk: int = 512,
        rngs: nnx.Rngs,
    ):
        """Build the model with normal(0.02) kernels.

        Args:
          vocab, layers, width, heads, hidden: V, the number of blocks, D, N, F.
          kv_heads: K, a divisor of `heads`.
          theta: the base of the rotary wavelengths.
          rope_scaling: how the wavelengths are lengthened, as Hugging Face configs write it:
            {"rope_type": "linear", "factor": 2.0}; see `RopeScaling`.
          length: the longest sequences that the model is meant for. Configs tell it to other
            programs; nothing here depends on it.
          eps: the number added to the mean square in every RMSNorm.
          tie: use the token embedding also as the head.
          head_width: H; None means width / heads.
          attention_bias, mlp_bias: whether the products of attention, and of the perceptron, have a
            bias.
          scan: run the blocks in one `nnx.scan` over stacked leaves; otherwise unroll them.
          remat: recompute each block's activations in backward (`nnx.remat`). A policy of
            `jax.checkpoint_policies` keeps some: products are named as their layers ("q_proj", ...
            "down_proj"), and what attention keeps is "attention".
          attention: which attention runs; see `causal_attention`.
          attention_block: the number of queries whose scores exist at a time, in forward and
            backward.
          loss_chunk: the number of positions whose logits exist at a time in `loss`, in forward and
            backward; 0 takes all. A sequence that is not longer is taken at once, and nothing is
            computed again.
          rngs: random numbers; the stream "params" is used.

        Raises:
          ValueError: `heads` or `kv_heads` do not divide as attention needs, or the scaling is
            unknown.
        """

        scaling = RopeScaling.of(rope_scaling)
        head_width = check_heads(width, heads, kv_heads, head_width)
        config = DecoderConfig(
            family="llama",
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
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=mlp_bias,
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
    def tiny(cls, **overrides: Any) -> "Callable[[nnx.Rngs], Llama]":
        """A model for tests, with a query group of 2: 22,688 parameters."""
        shape = {"vocab": 64, "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}
        return lambda rngs: cls(**{**shape, **overrides}, rngs=rngs)

    @classmethod
    def small(cls, **overrides: Any) -> "Callable[[nnx.Rngs], Llama]":
        """A model of about the size of GPT-2 small: 124,668,672 parameters."""
        shape = {"vocab": 32000, "layers": 12, "width": 768, "heads": 12, "kv_heads": 4}
        return lambda rngs: cls(**{**shape, "hidden": 2048, **overrides}, rngs=rngs)

    @classmethod
    def llama3_8b(cls, **overrides: Any) -> "Callable[[nnx.Rngs], Llama]":
        """Llama 3 8B: 8,030,261,248 parameters."""
        shape = {"vocab": 128256, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8}
        shape = {**shape, "hidden": 14336, "theta": 500000.0, "length": 8192}
        return lambda rngs: cls(**{**shape, **overrides}, rngs=rngs)


def check_heads(width: int, heads: int, kv_heads: int, head_width: int | None) -> int:
    """Return the width of a head, width / heads if it is not given.

    Raises:
      ValueError: `heads` or `kv_heads` do not divide as attention needs.
    """
    divides = head_width is not None or width % heads == 0
    of_head = head_width or width // heads
    if heads % kv_heads or not divides or of_head % 2:
        said = "" if head_width is None else f", head_width {head_width}"
        raise ValueError(
            f"width {width}, heads {heads}, kv_heads {kv_heads}{said}: kv_heads must divide heads, "
            "and width / heads, or head_width, must be a whole even number (rotary pairs)"
        )
    return of_head
