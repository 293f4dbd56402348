"""`DecoderConfig`: the shape of a `Decoder`, and the switches in which architectures differ."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from .moe_layers import Routing, check_experts
from .rotary import Rotary

Norm = Literal["rms", "rms_plus_one", "layer", "layer_no_bias"]
Arrangement = Literal["sequential", "sandwich", "norms_after", "parallel", "parallel_one_norm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of perceptrons in the place of each one.

    Attributes:
      count: E, the number of experts.
      top_k: the number of experts of each token.
      hidden: F, the hidden units of each expert.
      routing, capacity_factor: how tokens come to their experts; see `Mixtral`.
      balance: the factor of the load-balancing loss; see `moe_layers.balance_loss`.
      is_normalized: whether the weights of a token's experts add up to 1. If not, they are their
        part of the softmax over all experts.
      dense_layers: the numbers of the layers that have an ordinary perceptron instead.
      bias: whether the router and the products of experts have biases.
      scores: how logits become the weights of experts: by a softmax over all, or each by its
        sigmoid.
      correction: whether a learned number is added to each expert's score where experts are chosen,
        and nowhere else. It has no gradient. With sigmoids.
      groups, top_groups: experts are chosen in the `top_groups` groups of so many whose two best
        have the largest sum. With sigmoids.
      scale: what the weights are multiplied with.
      shared_hidden: the hidden units of a perceptron that every token takes besides; None for none.
      clamp: the largest value of a gate, and size of an up, in experts that give
        gate * sigmoid(1.702 gate) * (up + 1); None for silu(gate) * up without limits.
    """

    count: int
    top_k: int
    hidden: int
    routing: Routing = "ragged"
    capacity_factor: float = 1.25
    balance: float = 0.01
    is_normalized: bool = True
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    clamp: float | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    shared_hidden: int | None = None

    def __post_init__(self) -> None:
        check_experts(self.count, self.top_k)
        size, rest = divmod(self.count, max(self.groups, 1))
        fits = not rest and (self.groups == 1 or size > 1) and 1 <= self.top_groups <= self.groups
        if not fits or self.top_k > self.top_groups * size:
            raise ValueError(
                f"{self.count} experts in groups={self.groups}, top_groups={self.top_groups}, "
                f"top_k={self.top_k}: groups are of one size, at least 2, and those that are "
                "chosen hold top_k experts"
            )
        if self.scores == "softmax" and (self.correction or self.groups > 1):
            raise ValueError(
                f"correction={self.correction}, groups={self.groups} with "
                'scores="softmax": only sigmoids have them; give scores="sigmoid"'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Keys and values of all heads from one narrow array; see `latent_attention.py`.

    Attributes:
      query_rank: the width of a narrow array that queries come from; None for none.
      rank: C, the width of the one that keys and values come from.
      rotated: R, the numbers of a head, its last ones, that are rotated. In keys all heads share
        them.
      value_width: V, the width of a head's values.
    """

    query_rank: int | None
    rank: int
    rotated: int
    value_width: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder, and the switches in which architectures differ.

    Attributes:
      family: the name of its Hugging Face format, a config.json's `model_type`; None if it has
        none.
      vocab, layers, width, heads, kv_heads, head_width, hidden: V, the number of blocks, D, N, K, H
        and F. N * H need not be D.
      length: the longest sequences that the model is meant for. With learned positions it is their
        number, and longer sequences are an error; nothing else depends on it.
      norm: RMSNorm; RMSNorm whose scale is 1 + the leaf; LayerNorm with scale and bias, or with
        scale alone.
      eps: the number added to the variance in every norm.
      arrangement: how a block adds up attention and perceptron. "sequential": x + attention(norm
        x), then x + perceptron(norm x). "sandwich": the same, with one more norm after each.
        "norms_after": with norms after, and none before. "parallel": x + attention(norm x) +
        perceptron(another norm x). "parallel_one_norm": both read one norm.
      residual_scale: what the outputs of attention and perceptron are multiplied with before they
        are added; None for 1.
      positions: rotary tables, learned embeddings, slopes of scores (ALiBi).
      rotary: how heads are rotated; for rotary positions.
      rotated: for each layer, whether its heads are rotated. () means all. A layer without knows
        of positions only that keys come before queries.
      local_rotary: how heads are rotated in layers with a window; None, as in the others.
      first_position: the row of learned positions that position 0 takes.
      window: how many positions a query sees in the layers with a window; None without any.
      windowed: for each layer, whether it has the window. () means all.
      qkv_bias, out_bias, mlp_bias, head_bias: whether these products have a bias.
      qk_norm: what queries and keys are normalized over, before the rotation. "head": each head,
        all with one scale. "heads": each head, with a scale of its own. "all": all heads together.
        None for no norm.
      latent: keys and values from a narrow array; None for products of their own. Then heads have
        their own keys, K = N, and `qkv_bias` is of the products that give narrow arrays.
      sinks: whether each head has one more key with a learned score and the value 0.
      score_scale: what scores are multiplied with; None means 1 / sqrt(H).
      score_cap: the largest size of a score; None for no limit.
      activation: the perceptron's function.
      is_gated: down(activation(gate x) * up x), or down(activation(up x)).
      experts: a mixture in the place of perceptrons; None for none.
      embed_scale: what embeddings of tokens are multiplied with; None for 1. It is rounded to the
        dtype of the embeddings, as the models with one were trained.
      embed_norm: whether embeddings have a norm.
      tie: whether the embedding of tokens is also the head.
      logit_scale: what logits are multiplied with; None for 1.
      logit_cap: the largest size of a logit; None for no limit.
      source: the text of the config.json that the model was built from; None if from none.
    """

    family: str | None = None
    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    length: int = 2048
    norm: Norm = "rms"
    eps: float = 1e-5
    arrangement: Arrangement = "sequential"
    residual_scale: float | None = None
    positions: Literal["rotary", "learned", "alibi"] = "rotary"
    rotary: Rotary | None = None
    rotated: tuple[bool, ...] = ()
    local_rotary: Rotary | None = None
    first_position: int = 0
    window: int | None = None
    windowed: tuple[bool, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "heads", "all"] | None = None
    latent: LatentConfig | None = None
    sinks: bool = False
    score_scale: float | None = None
    score_cap: float | None = None
    activation: Activation = "silu"
    is_gated: bool = True
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    embed_scale: float | None = None
    embed_norm: bool = False
    tie: bool = False
    head_bias: bool = False
    logit_scale: float | None = None
    logit_cap: float | None = None
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = (self.vocab, self.layers, self.width, self.heads, self.kv_heads, self.head_width)
        if min(*sizes, self.hidden, self.length) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}: sizes must be "
                "at least 1, and kv_heads must divide heads"
            )
        if (self.positions == "rotary") != (self.rotary is not None):
            raise ValueError(
                f"positions={self.positions!r}, rotary={self.rotary}: rotary positions need "
                "rotary, and others have none"
            )
        for rotary in (self.rotary, self.local_rotary):
            if rotary is not None and (rotary.width % 2 or not 0 < rotary.width <= self.head_width):
                raise ValueError(
                    f"rotary width {rotary.width}, head_width {self.head_width}: heads are rotated "
                    "in pairs; give a whole even number up to head_width"
                )
        if self.windowed and (self.window is None or len(self.windowed) != self.layers):
            raise ValueError(
                f"window={self.window}, windowed={self.windowed}: give a window, and for each of "
                f"the {self.layers} layers whether it has it"
            )
        if self.rotated and (self.rotary is None or len(self.rotated) != self.layers):
            raise ValueError(
                f"rotary={self.rotary}, rotated={self.rotated}: give rotary, and for each of the "
                f"{self.layers} layers whether its heads are rotated"
            )
        if self.latent is not None and (
            self.kv_heads != self.heads
            or self.positions != "rotary"
            or self.qk_norm is not None
            or self.sinks
            or self.rotary is None
            or self.rotary.width != self.latent.rotated
        ):
            raise ValueError(
                f"latent={self.latent} with kv_heads={self.kv_heads} of {self.heads} heads, "
                f"rotary={self.rotary}, qk_norm={self.qk_norm}, sinks={self.sinks}: latent "
                "attention has keys for each head, rotary positions of its own width, no norm of "
                "heads and no sinks"
            )
        if self.qk_norm == "heads" and self.norm != "layer_no_bias":
            raise ValueError(
                f'qk_norm="heads", norm={self.norm!r}: heads with scales of their own have a '
                'LayerNorm without bias; give norm="layer_no_bias"'
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: a query sees at least its own position")

    def has_window(self, layer: int) -> bool:
        """Return whether a layer has the window."""
        return self.window is not None and (not self.windowed or self.windowed[layer])

    def is_rotated(self, layer: int) -> bool:
        """Return whether the heads of a layer are rotated."""
        return self.rotary is not None and (not self.rotated or self.rotated[layer])

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def is_uniform(self) -> bool:
        """Whether all blocks have the same leaves, so that a loop can run them."""
        return len({self.has_experts(layer) for layer in range(self.layers)}) == 1

    def replaced(self, **changes: Any) -> DecoderConfig:
        """Return the config with other values."""
        return dataclasses.replace(self, **changes)
