"""Llama (flax.nnx): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads,
G = N / K, H head width, F hidden. The parameter names and the mathematics are the same as in
Hugging Face's LlamaForCausalLM. Its weights are [out, in]; the kernels here are [in, out].
Source: Touvron et al., arXiv 2302.13971 and 2307.09288.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import BLOCK, Backend, causal_attention
from .head_losses import head_statistics
from .llama_format import FORMAT
from .llama_layers import NORMAL, Block
from .losses import head_logits, mean_loss
from .rotary import RopeScaling, rotary_tables


class Llama(nnx.Module):
    """A Llama language model. Presets return `lambda rngs: Llama(...)`, which allocates nothing.

    Parameters: `embed_tokens/embedding` [V, D], blocks, `norm/scale` [D], and, if untied, `lm_head`
    [V, D]. A block has `input_layernorm`, `self_attn/{q,k,v,o}_proj`, `post_attention_layernorm`
    and `mlp/{gate,up,down}_proj`. The blocks are `layers/0`, `layers/1`, ...; with scan there is
    one `layers` whose leaves have a leading layer dim.
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
            {"rope_type": "linear", "factor": 2.0}, or the type "llama3"; see `RopeScaling`.
          length: the longest sequences that the model is meant for. Configs tell it to other
            programs; nothing here depends on it.
          eps: the number added to the mean square in every RMSNorm.
          tie: use the token embedding also as the head.
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
        if heads % kv_heads or width % (2 * heads):
            raise ValueError(
                f"width {width}, heads {heads}, kv_heads {kv_heads}: kv_heads must divide heads, "
                "and width / heads must be a whole even number (rotary pairs)"
            )

        def block(rngs: nnx.Rngs) -> Block:
            kernel = functools.partial(causal_attention, backend=attention, block=attention_block)
            return Block(width, heads, kv_heads, hidden, eps, kernel, rngs=rngs)

        self.scan = scan
        self.remat = remat
        self.loss_chunk = loss_chunk
        self.vocab, self.num_layers, self.width, self.hidden = vocab, layers, width, hidden
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.theta, self.eps, self.length, self.tie = theta, eps, length, tie
        self.rope_scaling = RopeScaling.of(rope_scaling)
        self.embed_tokens = nnx.Embed(vocab, width, embedding_init=NORMAL, rngs=rngs)
        self.layers: Any
        if scan:
            self.layers = nnx.vmap(block)(rngs.split(layers))
        else:
            self.layers = nnx.List(block(rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.lm_head = None if tie else nnx.Param(NORMAL(rngs.params(), (vocab, width)))
        self.cache_index: nnx.Cache | None = nnx.data(None)

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

    def init_cache(self, shape: tuple[int, int], dtype: Any = jnp.float32) -> None:
        """Make an empty cache, in `nnx.Cache` variables, for the keys and values of later calls.

        Args:
          shape: (B, number of places).
          dtype: the dtype of the cached keys and values.
        """
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))
        stacked = (self.num_layers,) if self.scan else ()
        for block in (self.layers,) if self.scan else self.layers:
            block.self_attn.init_cache((*stacked, *shape), dtype)

    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        mask_BL: jax.Array | None = None,
        targets_BL: jax.Array | None = None,
        with_entropy: bool = False,
    ) -> Any:
        """Return the logits of each position's next token, or the losses of given ones.

        Args:
          tokens_BL: int[B, L].
          positions_BL: int[B, L] or [1, L]; give them for left-padded rows. None means 0, 1, ...,
            or, with a cache, counting from the number of tokens that it holds.
          mask_BL: nonzero at real tokens, 0 at padding. With a cache, one for each of its places.
          targets_BL: int[B, L], the next tokens; None returns the logits.
          with_entropy: whether the entropies of the distributions are returned beside the losses.

        Returns:
          The logits, float32[B, L, V], or the cross-entropy of each target in nats, float32[B, L],
          or (cross-entropies, entropies).
        """
        start: jax.Array | int = 0
        if self.cache_index is not None:
            start = self.cache_index[...]
            self.cache_index[...] += tokens_BL.shape[1]
        if positions_BL is None:
            positions_BL = start + jnp.arange(tokens_BL.shape[1])[None, :]
        rotation = rotary_tables(positions_BL, self.head_width, self.theta, self.rope_scaling)

        def run(x_BLD: jax.Array, block: Block) -> jax.Array:
            return block(x_BLD, rotation, mask_BL, start)

        if self.remat:
            policy = None if self.remat is True else self.remat
            run = nnx.remat(run, prevent_cse=not self.scan, policy=policy, graph_updates=False)
        # Not embed_tokens(...), because nnx.Embed casts to the dtype that its table was built with.
        x_BLD = jnp.take(self.embed_tokens.embedding[...], tokens_BL, axis=0)
        if self.scan:
            x_BLD = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BLD, self.layers)
        else:
            for block in self.layers:
                x_BLD = run(x_BLD, block)
        x_BLD = self.norm(x_BLD)
        head_VD = self.embed_tokens.embedding if self.lm_head is None else self.lm_head
        if targets_BL is None:
            return head_logits(x_BLD, head_VD[...])
        found = head_statistics(x_BLD, head_VD[...], targets_BL, self.loss_chunk, with_entropy)
        return found if with_entropy else found[0]

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (mean cross-entropy in nats, metrics) for {"tokens": int32[B, length + 1]}.

        The batch may hold "mask" [B, length], nonzero at the targets that count; see
        `next_token_loss`. Nothing here depends on `train`, because the model has no dropout.
        """
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        return mean_loss(self(tokens_BL, targets_BL=targets_BL), batch)
