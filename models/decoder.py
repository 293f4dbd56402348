"""`Decoder` (flax.nnx): one language model, with switches for what architectures differ in.

Shape letters: B batch, L positions, D width, V vocabulary, N query heads, K key-value heads,
G = N / K, H head width, F hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import BLOCK, Backend, causal_attention
from .decoder_block import Block
from .decoder_config import DecoderConfig
from .decoder_layers import NORMAL, Places, alibi_slopes, norm
from .families import FAMILIES
from .head_losses import head_statistics
from .losses import Head, head_logits, mean_loss


class Decoder(nnx.Module):
    """A causal language model of equal blocks; `Llama` and `Mixtral` are made of it.

    Parameters: `embed_tokens/embedding` [V, D], with learned positions `embed_positions/embedding`,
    blocks, `norm/scale` [D], and, if untied, `lm_head` [V, D]. A block has `input_layernorm`,
    `self_attn/{q,k,v,o}_proj`, `post_attention_layernorm` and `mlp/{gate,up,down}_proj`, or for
    experts `router/kernel` [D, E], `experts/gate_proj` and `experts/up_proj` [E, D, F], and
    `experts/down_proj` [E, F, D]. The blocks are `layers/0`, `layers/1`, ...; with scan there is
    one `layers` whose leaves have a leading layer dim.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        scan: bool | None = None,
        remat: bool | Callable[..., Any] = False,
        attention: Backend = "auto",
        attention_block: int = BLOCK,
        loss_chunk: int = 512,
        rngs: nnx.Rngs,
    ) -> None:
        """Build the model with normal(0.02) kernels and embeddings.

        Args:
          config: its shape.
          scan: run the blocks in one `nnx.scan` over stacked leaves; otherwise unroll them. None
            scans if all blocks have the same leaves.
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
          ValueError: the blocks cannot be scanned.
        """
        scan = config.is_uniform if scan is None else scan
        if scan and not config.is_uniform:
            raise ValueError(
                "scan=True, and only some of the blocks have experts: a loop runs blocks with the "
                "same leaves; give scan=False"
            )
        self.config, self.scan, self.remat, self.loss_chunk = config, scan, remat, loss_chunk
        # Others ask any model for these: whether tokens fit, how long sequences may be.
        self.vocab, self.length = config.vocab, config.length
        if config.family in FAMILIES:
            self.hugging_face = FAMILIES[config.family]
        kernel = functools.partial(causal_attention, backend=attention, block=attention_block)
        if config.score_scale is not None:
            kernel = functools.partial(kernel, scale=config.score_scale)
        if config.score_cap is not None:
            kernel = functools.partial(kernel, softcap=config.score_cap)
        self.embed_tokens = nnx.Embed(config.vocab, config.width, embedding_init=NORMAL, rngs=rngs)
        self.embed_positions: nnx.Embed | None = nnx.data(None)
        if config.positions == "learned":
            rows = config.length + config.first_position
            self.embed_positions = nnx.Embed(rows, config.width, embedding_init=NORMAL, rngs=rngs)
        self.embed_norm = nnx.data(norm(config, rngs) if config.embed_norm else None)
        self.layers: Any
        if scan:
            make_block = functools.partial(_block, config, 0, kernel)
            self.layers = nnx.vmap(make_block)(rngs.split(config.layers))
        else:
            blocks = (Block(config, i, kernel, rngs=rngs) for i in range(config.layers))
            self.layers = nnx.List(blocks)
        self.norm = norm(config, rngs)
        shape = config.vocab, config.width
        self.lm_head = nnx.data(None if config.tie else nnx.Param(NORMAL(rngs.params(), shape)))
        bias = nnx.Param(jnp.zeros(config.vocab)) if config.head_bias else None
        self.lm_head_bias = nnx.data(bias)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def init_cache(self, shape: tuple[int, int], dtype: Any = jnp.float32) -> None:
        """Make an empty cache, in `nnx.Cache` variables, for the keys and values of later calls.

        Args:
          shape: (B, number of places).
          dtype: the dtype of the cached keys and values.
        """
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))
        stacked = (self.config.layers,) if self.scan else ()
        for block in (self.layers,) if self.scan else self.layers:
            block.self_attn.init_cache((*stacked, *shape), dtype)

    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        mask_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        targets_BL: jax.Array | None = None,
        with_entropy: bool = False,
    ) -> Any:
        """Return the logits of each position's next token, or the losses of given ones.

        Args:
          tokens_BL: int[B, L].
          positions_BL: int[B, L] or [1, L]; give them for left-padded rows. None means 0, 1, ...,
            or, with a cache, counting from the number of tokens that it holds.
          mask_BL: nonzero at real tokens, 0 at padding. With a cache, one for each of its places.
          segments_BL: int[B, L], the number of each token's document, for rows of several. A token
            sees those of its own document alone; give their positions too. Not with a cache.
          targets_BL: int[B, L], the next tokens; None returns the logits.
          with_entropy: whether the entropies of the distributions are returned beside the losses.

        Returns:
          The logits, float32[B, L, V], or the cross-entropy of each target in nats, float32[B, L],
          or (cross-entropies, entropies).

        Raises:
          ValueError: L is above the number of learned positions.
        """
        x_BLD, _ = self.trunk(tokens_BL, positions_BL, mask_BL, segments_BL)
        if targets_BL is None:
            return head_logits(x_BLD, self.head)
        found = head_statistics(x_BLD, self.head, targets_BL, self.loss_chunk, with_entropy)
        return found if with_entropy else found[0]

    def trunk(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array | None = None,
        mask_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the head's input, [B, L, D], and the statistics of the blocks, each [layers].

        It takes the same arguments as a call. If the model has a cache, the cache advances.
        """
        config = self.config
        start: jax.Array | int = 0
        if self.cache_index is not None:
            start = self.cache_index[...]
            self.cache_index[...] += tokens_BL.shape[1]
        if positions_BL is None:
            positions_BL = start + jnp.arange(tokens_BL.shape[1])[None, :]
        slopes_KG = None
        if config.positions == "alibi":
            slopes_KG = jnp.asarray(alibi_slopes(config.heads)).reshape(config.kv_heads, -1)
        rotary, local = config.rotary, config.local_rotary
        rotation = None if rotary is None else rotary.tables(positions_BL)
        local_rotation = None if local is None else local.tables(positions_BL)
        places = Places(rotation, mask_BL, segments_BL, start, None, slopes_KG)

        def run(kind: Kind, x_BLD: jax.Array, block: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            return block(x_BLD, _of_layer(places, config, kind, local_rotation), rotary)

        return self._run_blocks(run, self._embed(tokens_BL, positions_BL))

    def _embed(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        config = self.config
        # Not embed_tokens(...), because nnx.Embed casts to the dtype that its table was built with.
        x_BLD = jnp.take(self.embed_tokens.embedding[...], tokens_BL, axis=0)
        if config.embed_scale is not None:
            x_BLD *= jnp.asarray(config.embed_scale, x_BLD.dtype)
        if self.embed_positions is not None:
            if tokens_BL.shape[1] > config.length:
                raise ValueError(
                    f"sequence of {tokens_BL.shape[1]} tokens, but the model has {config.length} "
                    "positions; cut the sequence, or take a model with more"
                )
            rows_BL = positions_BL + config.first_position
            x_BLD += jnp.take(self.embed_positions.embedding[...], rows_BL, axis=0)
        return x_BLD if self.embed_norm is None else self.embed_norm(x_BLD)

    def _run_blocks(
        self, run: Callable[..., Any], x_BLD: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        config, layers = self.config, range(self.config.layers)
        kinds = [Kind(config.has_window(layer), config.is_rotated(layer)) for layer in layers]
        if self.scan:
            # What differs between the turns of the loop is chosen at run time.
            of_layers = dict(zip(Kind._fields, zip(*kinds, strict=True), strict=True))
            differing = {
                name: jnp.asarray(own) for name, own in of_layers.items() if len(set(own)) > 1
            }

            def turn(x_BLD: jax.Array, block: Any, own: dict[str, jax.Array]) -> Any:
                return run(kinds[0]._replace(**own), x_BLD, block)

            axes = (nnx.Carry, 0, 0)
            scanned = nnx.scan(self._recomputed(turn), in_axes=axes, out_axes=(nnx.Carry, 0))
            x_BLD, statistics = scanned(x_BLD, self.layers, differing)
        else:
            found: list[dict[str, jax.Array]] = []
            for block, kind in zip(self.layers, kinds, strict=True):
                x_BLD, of_block = self._recomputed(functools.partial(run, kind))(x_BLD, block)
                found.append(of_block)
            names = dict.fromkeys(name for of_block in found for name in of_block)
            statistics = {
                name: jnp.stack([of_block[name] for of_block in found if name in of_block])
                for name in names
            }
        return self.norm(x_BLD), statistics

    def _recomputed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a block whose activations backward computes again, if asked for."""
        if not self.remat:
            return run
        policy = None if self.remat is True else self.remat
        return nnx.remat(run, prevent_cse=not self.scan, policy=policy, graph_updates=False)

    @property
    def head(self) -> Head:
        """The head; its weight is the embedding of tokens if they are tied."""
        weight_VD = self.embed_tokens.embedding if self.lm_head is None else self.lm_head
        bias_V = None if self.lm_head_bias is None else self.lm_head_bias[...]
        return Head(weight_VD[...], bias_V, self.config.logit_cap, self.config.logit_scale)

    def loss(
        self, batch: dict[str, jax.Array], *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (loss, metrics) for {"tokens": int32[B, length + 1]}.

        The loss is the mean cross-entropy in nats. With experts, `balance` times the balancing loss
        is added, which is the mean over the layers and comes back as metrics["balance"]; it counts
        all tokens. With routing by capacity, metrics["dropped"] is the share of the pairs of token
        and expert that found no place.

        The batch may hold "mask" [B, length], nonzero at the targets that count; see
        `next_token_loss`; and for rows of several documents "segments" and "positions",
        int32[B, length], of the tokens but the last. Nothing here depends on `train`, because the
        model has no dropout.
        """
        tokens_BL, targets_BL = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x_BLD, statistics = self.trunk(
            tokens_BL, batch.get("positions"), segments_BL=batch.get("segments")
        )
        losses_BL = head_statistics(x_BLD, self.head, targets_BL, self.loss_chunk)[0]
        loss, metrics = mean_loss(losses_BL, batch)
        if self.config.experts is None:
            return loss, metrics
        of_layers = {name: scalars.mean() for name, scalars in statistics.items()}
        balance = self.config.experts.balance * of_layers["balance"]
        return loss + balance, {**metrics, **of_layers}


def _block(config: DecoderConfig, layer: int, kernel: Any, rngs: nnx.Rngs) -> Block:
    return Block(config, layer, kernel, rngs=rngs)


class Kind(NamedTuple):
    """What layers differ in. An array, bool, chooses at run time.

    Attributes:
      windowed: whether the layer has the window.
      rotated: whether its heads are rotated.
    """

    windowed: jax.Array | bool
    rotated: jax.Array | bool


def _of_layer(places: Places, config: DecoderConfig, kind: Kind, local_rotation: Any) -> Places:
    """Return the places as a layer sees them."""
    rotation, window = places.rotation, None
    if isinstance(kind.windowed, bool):
        window = config.window if kind.windowed else None
        if kind.windowed and local_rotation is not None:
            rotation = local_rotation
    else:
        window = jnp.where(kind.windowed, config.window or 0, jnp.iinfo(jnp.int32).max)
        if rotation is not None and local_rotation is not None:
            cos, sin = (jnp.where(kind.windowed, *pair) for pair in zip(local_rotation, rotation))
            rotation = cos, sin
    if kind.rotated is False:
        rotation = None
    elif rotation is not None and not isinstance(kind.rotated, bool):
        cos, sin = rotation
        rotation = jnp.where(kind.rotated, cos, 1), jnp.where(kind.rotated, sin, 0)
    return places._replace(window=window, rotation=rotation)
