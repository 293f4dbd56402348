"""The part that Llama and Mixtral share: embedding, a stack of blocks, the last norm and the head.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads,
H head width.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .head_losses import head_statistics
from .llama_layers import NORMAL
from .losses import head_logits
from .rotary import RopeScaling, rotary_tables


class Decoder(nnx.Module):
    """A language model of equal blocks with rotary positions; the base of `Llama` and `Mixtral`."""

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        *,
        vocab: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        theta: float,
        rope_scaling: Mapping[str, Any] | RopeScaling | None,
        length: int,
        eps: float,
        tie: bool,
        scan: bool,
        remat: bool | Callable[..., Any],
        loss_chunk: int,
        rngs: nnx.Rngs,
    ):
        """Build the model with normal(0.02) embeddings.

        Args:
          make_block: builds a block. A block is called as `block(x_BLD, rotation, mask_BL, start)`
            and returns x_BLD and a dict of scalars, its statistics, with the same names in every
            block.
          vocab, layers, width, heads, kv_heads, theta, rope_scaling, length, eps, tie, scan, remat,
            loss_chunk, rngs: as for `Llama`.

        Raises:
          ValueError: `heads` or `kv_heads` do not divide as attention needs, or the scaling is
            unknown.
        """
        if heads % kv_heads or width % (2 * heads):
            raise ValueError(
                f"width {width}, heads {heads}, kv_heads {kv_heads}: kv_heads must divide heads, "
                "and width / heads must be a whole even number (rotary pairs)"
            )
        self.scan = scan
        self.remat = remat
        self.loss_chunk = loss_chunk
        self.vocab, self.num_layers, self.width = vocab, layers, width
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.theta, self.eps, self.length, self.tie = theta, eps, length, tie
        self.rope_scaling = RopeScaling.of(rope_scaling)
        self.embed_tokens = nnx.Embed(vocab, width, embedding_init=NORMAL, rngs=rngs)
        self.layers: Any
        if scan:
            self.layers = nnx.vmap(make_block)(rngs.split(layers))
        else:
            self.layers = nnx.List(make_block(rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(width, epsilon=eps, rngs=rngs)
        self.lm_head = None if tie else nnx.Param(NORMAL(rngs.params(), (vocab, width)))
        self.cache_index: nnx.Cache | None = nnx.data(None)

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
        x_BLD, _ = self.trunk(tokens_BL, positions_BL, mask_BL)
        if targets_BL is None:
            return head_logits(x_BLD, self.head_VD)
        found = head_statistics(x_BLD, self.head_VD, targets_BL, self.loss_chunk, with_entropy)
        return found if with_entropy else found[0]

    def trunk(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        mask_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the head's input, [B, L, D], and the statistics of the blocks, each [layers].

        It takes the same arguments as a call. If the model has a cache, the cache advances.
        """
        start: jax.Array | int = 0
        if self.cache_index is not None:
            start = self.cache_index[...]
            self.cache_index[...] += tokens_BL.shape[1]
        if positions_BL is None:
            positions_BL = start + jnp.arange(tokens_BL.shape[1])[None, :]
        rotation = rotary_tables(positions_BL, self.head_width, self.theta, self.rope_scaling)

        def run(x_BLD: jax.Array, block: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return block(x_BLD, rotation, mask_BL, start)

        if self.remat:
            policy = None if self.remat is True else self.remat
            run = nnx.remat(run, prevent_cse=not self.scan, policy=policy, graph_updates=False)
        # Not embed_tokens(...), because nnx.Embed casts to the dtype that its table was built with.
        x_BLD = jnp.take(self.embed_tokens.embedding[...], tokens_BL, axis=0)
        if self.scan:
            over_layers = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
            x_BLD, statistics = over_layers(x_BLD, self.layers)
        else:
            found = []
            for block in self.layers:
                x_BLD, of_block = run(x_BLD, block)
                found.append(of_block)
            statistics = jax.tree.map(lambda *scalars: jnp.stack(scalars), *found)
        return self.norm(x_BLD), statistics

    @property
    def head_VD(self) -> jax.Array:
        """The head: the token embedding if they are tied."""
        head_VD = self.embed_tokens.embedding if self.lm_head is None else self.lm_head
        return head_VD[...]
