"""DeepSeek-V3: latent attention, and experts by sigmoids in groups, one of them for all tokens."""

from typing import Any

from ..decoder_config import ExpertsConfig, LatentConfig
from .decoder_format import (
    HIDDEN,
    SIZES,
    TIE,
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    kernels_of,
    layer_paths,
    rotary_of,
)
from .llama_like import ENDS, LAYOUT, NORMS, PERCEPTRON, blocks

_ATTENTION = {
    **{f"self_attn/{x}_proj": f"self_attn.{x}_proj" for x in ("q", "q_a", "q_b", "kv_b", "o")},
    "self_attn/kv_a_proj": "self_attn.kv_a_proj_with_mqa",
}
_NORMS = {
    **NORMS,
    **{f"self_attn/{x}_layernorm": f"self_attn.{x}_layernorm" for x in ("q_a", "kv_a")},
}
_SHARED = {
    f"shared_expert/{x}_proj": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")
}
_TENSORS = {
    **ENDS,
    **blocks({**_ATTENTION, **PERCEPTRON, **_SHARED}, _NORMS),
    **layer_paths(
        {
            "router/kernel": "mlp.gate.weight",
            "score_correction": "mlp.gate.e_score_correction_bias",
            **{
                f"experts/{x}_proj": f"mlp.experts.{{expert}}.{x}_proj.weight"
                for x in ("gate", "up", "down")
            },
        },
        "model.layers.{layer}",
    ),
}


def _deepseek(fields: Fields, config: Fields) -> dict[str, Any]:
    plain, rotated = fields["plain"], fields["rotated_width"]
    pairs = "neighbours" if config.get("rope_interleave", True) else "halves"
    rotary = rotary_of(config, rotated, pairs=pairs)
    # Scores grow with the scaling of positions, besides what cos and sin grow.
    scaling, growth = rotary.scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim:
        growth = scaling.growth(scaling.mscale_all_dim)
    bias = bool(config.get("attention_bias", False))
    return {
        "kv_heads": fields["heads"],
        "head_width": plain + rotated,
        "rotary": rotary,
        "activation": activation_of(config),
        "qkv_bias": bias,
        "out_bias": bias,
        "score_scale": (plain + rotated) ** -0.5 * growth**2,
        "latent": LatentConfig(
            query_rank=fields["query_rank"],
            rank=fields["rank"],
            rotated=rotated,
            value_width=fields["value_width"],
        ),
        "experts": ExpertsConfig(
            count=fields["experts"],
            top_k=fields["top_k"],
            hidden=fields["expert_hidden"],
            balance=0.0,
            is_normalized=bool(config.get("norm_topk_prob", True)),
            dense_layers=tuple(range(config.get("first_k_dense_replace", 3))),
            scores="sigmoid",
            correction=True,
            groups=fields["groups"],
            top_groups=fields["top_groups"],
            scale=float(config.get("routed_scaling_factor", 2.5)),
            shared_hidden=fields["expert_hidden"] * fields["shared"],
        ),
    }


DEEPSEEK_V3 = DecoderFormat(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    **{**LAYOUT, "tensors": _TENSORS, "transposed": kernels_of(_TENSORS)},
    # The public files have one more layer, which predicts the token after the next one.
    kept=(r"layers\.61\..*",),
    fields={
        **SIZES,
        **HIDDEN,
        **TIE,
        "length": Key(name="max_position_embeddings", default=4096, is_computed=False),
        "eps": Key(name="rms_norm_eps", default=1e-6),
        "query_rank": Key(name="q_lora_rank", default=1536, is_optional=True),
        "rank": Key(name="kv_lora_rank", default=512),
        "plain": Key(name="qk_nope_head_dim", default=128),
        "rotated_width": Key(name="qk_rope_head_dim", default=64),
        "value_width": Key(name="v_head_dim", default=128),
        "experts": Key(name="n_routed_experts", default=256),
        "top_k": Key(name="num_experts_per_tok", default=8),
        "expert_hidden": Key(name="moe_intermediate_size", default=2048),
        "shared": Key(name="n_shared_experts", default=1),
        "groups": Key(name="n_group", default=8),
        "top_groups": Key(name="topk_group", default=4),
    },
    choices={
        "hidden_act": ("silu", "swish"),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    build=_deepseek,
)
