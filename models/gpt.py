"""GPT-2 (flax.linen): learned positions, pre-LayerNorm blocks, tanh-GELU, tied head.

Shape letters: B batch, L positions, D width, V vocabulary, N heads, H head width (D / N), F hidden.
The parameter names and the mathematics are the same as in Hugging Face's GPT2LMHeadModel. Its
Conv1D weights are [in, out], like the kernels here.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners".
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from .attention import BLOCK, Backend
from .gpt_format import FORMAT
from .gpt_layers import Block, layer_norm
from .head_losses import head_statistics
from .losses import head_logits, mean_loss


class GPT(nn.Module):
    """A GPT-2 language model.

    Parameters: `wte/embedding` [V, D], `wpe/embedding` [length, D], blocks, `ln_f`, and, if untied,
    `lm_head` [V, D]. A block has `ln_1`, `attn/c_attn` (kernel [D, 3 D]: queries, keys, values),
    `attn/c_proj`, `ln_2`, `mlp/c_fc` and `mlp/c_proj`. The blocks are `h_0`, `h_1`, ...; with scan
    there is one `h` whose leaves have a leading layer dim.
    """

    hugging_face = FORMAT

    vocab: int = 50257
    length: int = 1024
    """The longest sequence: the number of learned positions."""
    layers: int = 12
    width: int = 768
    heads: int = 12
    hidden: int | None = None
    """The hidden width of a block's perceptron. None means 4 x width."""
    dropout: float = 0.0
    """Dropout rate on embeddings, attention and residual branches, in training only (rng stream
    "dropout")."""
    tie: bool = True
    """Use the token embedding also as the head."""
    scan: bool = True
    """Run the blocks in one `nn.scan` over stacked leaves; otherwise unroll them."""
    remat: bool | Callable[..., Any] = False
    """Recompute each block's activations in backward (`nn.remat`). A policy of
    `jax.checkpoint_policies` keeps some of them."""
    attention: Backend = "auto"
    """Which attention runs; see `causal_attention`."""
    attention_block: int = BLOCK
    """The number of queries whose scores exist at a time, in forward and backward."""
    loss_chunk: int = 512
    """The number of positions whose logits exist at a time in `loss`, in forward and backward; 0
    takes all. A sequence that is not longer is taken at once, and nothing is computed again."""
    decode: bool = False
    """Keep keys and values in the collection "cache", as `flax.linen`'s own attention does. `init`
    on tokens of the cache's full shape makes it; `apply(..., mutable="cache")` advances it."""

    @classmethod
    def tiny(cls, **overrides: Any) -> "GPT":
        """A model for tests: 28,544 parameters."""
        shape = {"vocab": 64, "length": 32, "layers": 2, "width": 32, "heads": 4}
        return cls(**{**shape, **overrides})

    @classmethod
    def bytes(cls, **overrides: Any) -> "GPT":
        """A model of bytes, for a machine without an accelerator: 4,870,144 parameters."""
        shape = {"vocab": 256, "length": 256, "layers": 6, "width": 256, "heads": 8}
        return cls(**{**shape, **overrides})

    @classmethod
    def small(cls, **overrides: Any) -> "GPT":
        """GPT-2 small: 124,439,808 parameters."""
        return cls(**overrides)

    @classmethod
    def xl(cls, **overrides: Any) -> "GPT":
        """GPT-2 XL: 1,557,611,200 parameters."""
        return cls(**{"layers": 48, "width": 1600, "heads": 25, **overrides})

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        mask_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        targets_BL: jax.Array | None = None,
        with_entropy: bool = False,
        train: bool = False,
    ) -> Any:
        """Return the logits of each position's next token, or the losses of given ones.

        Args:
          tokens_BL: int[B, L], with L at most `length`.
          positions_BL: int[B, L] or [1, L]; give them for left-padded rows. None means 0, 1, ...,
            or, with a cache, counting from the number of tokens that it holds.
          mask_BL: nonzero at real tokens, 0 at padding. With a cache, one for each of its places.
          segments_BL: int[B, L], the number of each token's document, for rows of several. A token
            sees those of its own document alone; give their positions too. Not with a cache.
          targets_BL: int[B, L], the next tokens; None returns the logits.
          with_entropy: whether the entropies of the distributions are returned beside the losses.
          train: whether dropout acts.

        Returns:
          The logits, float32[B, L, V], or the cross-entropy of each target in nats, float32[B, L],
          or (cross-entropies, entropies).

        Raises:
          ValueError: L is above `length`, or `width` is not a multiple of `heads`.
        """
        length = tokens_BL.shape[1]
        if length > self.length:
            raise ValueError(
                f"sequence of {length} tokens, but the model has {self.length} positions; "
                f"cut the sequence, or build the model with length={length}"
            )
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads; change one of them"
            )
        start: jax.Array | int = 0
        if self.decode:
            reads_cache = self.has_variable("cache", "cache_index")
            index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
            start = index.value
            if reads_cache:
                index.value += length
        if positions_BL is None:
            positions_BL = start + jnp.arange(length)[None, :]

        init = nn.initializers.normal(0.02)
        wte = nn.Embed(self.vocab, self.width, embedding_init=init, name="wte")
        wpe = nn.Embed(self.length, self.width, embedding_init=init, name="wpe")
        x_BLD = wte(tokens_BL) + wpe(positions_BL)
        x_BLD = nn.Dropout(self.dropout, deterministic=not train)(x_BLD)
        x_BLD = self._blocks(x_BLD, mask_BL, start, segments_BL, train)
        x_BLD = layer_norm("ln_f")(x_BLD)
        if self.tie:
            head_VD = wte.embedding
        else:
            head_VD = self.param("lm_head", init, (self.vocab, self.width))
        if targets_BL is None:
            return head_logits(x_BLD, head_VD)
        found = head_statistics(x_BLD, head_VD, targets_BL, self.loss_chunk, with_entropy)
        return found if with_entropy else found[0]

    def _blocks(
        self,
        x_BLD: jax.Array,
        mask_BL: jax.Array | None,
        start: jax.Array | int,
        segments_BL: jax.Array | None,
        train: bool,
    ) -> jax.Array:
        # In a scan the loop itself keeps forward and recomputation apart, so no barrier is needed.
        block = Block
        if self.remat:
            policy = None if self.remat is True else self.remat
            block = nn.remat(Block, prevent_cse=not self.scan, policy=policy)
        shape = {
            "heads": self.heads,
            "hidden": self.hidden or 4 * self.width,
            "layers": self.layers,
            "dropout": self.dropout,
            "train": train,
            "decode": self.decode,
            "backend": self.attention,
            "attention_block": self.attention_block,
        }
        if not self.scan:
            for i in range(self.layers):
                # Else XLA, on CPUs, adds up all earlier blocks again wherever a block reads x, in
                # backward too.
                x_BLD = jax.lax.optimization_barrier(x_BLD)
                x_BLD, _ = block(**shape, name=f"h_{i}")(x_BLD, mask_BL, start, segments_BL)
            return x_BLD
        stack = nn.scan(
            block,
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]  (annotated as int)
            length=self.layers,
        )
        return stack(**shape, name="h")(x_BLD, mask_BL, start, segments_BL)[0]

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (mean cross-entropy in nats, metrics) for {"tokens": int32[B, length + 1]}.

        The batch may hold "mask" [B, length], nonzero at the targets that count; see
        `next_token_loss`; and for rows of several documents "segments" and "positions",
        int32[B, length], of the tokens but the last.
        """
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        losses_BL = self(
            tokens_BL,
            positions_BL=batch.get("positions"),
            segments_BL=batch.get("segments"),
            targets_BL=targets_BL,
            train=train,
        )
        return mean_loss(losses_BL, batch)
