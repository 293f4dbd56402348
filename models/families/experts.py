"""Mixtral, Qwen3-MoE, Granite-MoE and gpt-oss: experts in the place of perceptrons."""

from typing import Any

from ..decoder_config import ExpertsConfig
from ..format import Fused
from .decoder_format import (
    DecoderFormat,
    Fields,
    Key,
    grouped,
    kernels_of,
    layer_paths,
    rotary_of,
)
from .llama_like import (
    ATTENTION,
    ENDS,
    HEAD_NORMS,
    LAYOUT,
    NORMS,
    PERCEPTRON,
    biases_of,
    blocks,
    multipliers_of,
    windows_of,
)


def _bank(router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the tensors of the experts of each block."""
    names = {"router/kernel": router, "experts/gate_proj": gate, "experts/up_proj": up}
    return layer_paths({**names, "experts/down_proj": down}, "model.layers.{layer}")


# Experts compute no other function.
_SILU = {"hidden_act": ("silu", "swish")}

_MIXTRAL_TENSORS = {
    **ENDS,
    **blocks(ATTENTION, NORMS),
    **_bank(
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.{{expert}}.{x}.weight" for x in ("w1", "w3", "w2")),
    ),
}


def _mixtral(fields: Fields, config: Fields) -> dict[str, Any]:
    return {
        "rotary": rotary_of(config, fields["head_width"], theta=1e6),
        "experts": ExpertsConfig(
            count=fields["experts"],
            top_k=fields["top_k"],
            hidden=fields["hidden"],
            balance=float(config.get("router_aux_loss_coef", 0.001)),
        ),
        **windows_of(fields, config),
    }


MIXTRAL = DecoderFormat(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    **{**LAYOUT, "tensors": _MIXTRAL_TENSORS, "transposed": kernels_of(_MIXTRAL_TENSORS)},
    fields={
        **grouped(kv_heads=8, eps=1e-5),
        "experts": Key(name="num_local_experts", default=8),
        "top_k": Key(name="num_experts_per_tok", default=2),
    },
    choices=_SILU,
    build=_mixtral,
)

_QWEN_TENSORS = {
    **ENDS,
    **blocks({**ATTENTION, **PERCEPTRON}, {**NORMS, **HEAD_NORMS}),
    **_bank(
        "mlp.gate.weight",
        *(f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up", "down")),
    ),
}


def _qwen3_moe(fields: Fields, config: Fields) -> dict[str, Any]:
    every = config.get("decoder_sparse_step", 1)
    plain = set(config.get("mlp_only_layers") or ())
    dense = (i for i in range(fields["layers"]) if i in plain or (i + 1) % every)
    # As in Qwen2 and Qwen3, but all layers have the window.
    own = {"sliding_window": 4096, **config, "layer_types": None}
    windows = windows_of(fields, own) if config.get("use_sliding_window") else {}
    count = config.get("num_experts", config.get("num_local_experts"))
    if count is None:
        raise ValueError("the config has neither num_experts nor num_local_experts; it must")
    return {
        "rotary": rotary_of(config, fields["head_width"]),
        "qk_norm": "head",
        "experts": ExpertsConfig(
            count=count,
            top_k=fields["top_k"],
            hidden=fields["expert_hidden"],
            balance=float(config.get("router_aux_loss_coef", 0.001)),
            is_normalized=bool(config.get("norm_topk_prob", False)),
            dense_layers=tuple(dense),
        ),
        **windows,
    }


QWEN3_MOE = DecoderFormat(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    **{**LAYOUT, "tensors": _QWEN_TENSORS, "transposed": kernels_of(_QWEN_TENSORS)},
    fields={
        **grouped(kv_heads=4),
        "top_k": Key(name="num_experts_per_tok", default=8),
        "expert_hidden": Key(name="moe_intermediate_size", default=768),
    },
    choices={"attention_bias": (False,), **_SILU},
    build=_qwen3_moe,
)

_GATE_UP = ("experts/gate_proj", "experts/up_proj")


def _together(*leaves: str, groups: str | None = None) -> Fused:
    return Fused(leaves=tuple(f"layers/{{layer}}/{leaf}" for leaf in leaves), groups=groups)


_GRANITE_TENSORS = {
    **ENDS,
    **blocks(ATTENTION, NORMS),
    **_bank(
        router="block_sparse_moe.router.layer.weight",
        gate="block_sparse_moe.input_linear.weight",
        up="block_sparse_moe.input_linear.weight",
        down="block_sparse_moe.output_linear.weight",
    ),
}

GRANITE_MOE = DecoderFormat(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    **{**LAYOUT, "tensors": _GRANITE_TENSORS, "transposed": kernels_of(_GRANITE_TENSORS)},
    fused=(_together(*_GATE_UP),),
    fields={
        **grouped(),
        "experts": Key(name="num_local_experts", default=8),
        "top_k": Key(name="num_experts_per_tok", default=2),
    },
    choices=_SILU,
    build=lambda fields, config: {
        **_mixtral(fields, {**config, "sliding_window": None}),
        "rotary": rotary_of(config, fields["head_width"]),
        **biases_of(config),
        **multipliers_of(config),
    },
)

_OSS_BANK = layer_paths(
    {
        "router/kernel": "router.weight",
        "router/bias": "router.bias",
        **dict.fromkeys(_GATE_UP, "experts.gate_up_proj"),
        "experts/down_proj": "experts.down_proj",
        **dict.fromkeys(("experts/gate_bias", "experts/up_bias"), "experts.gate_up_proj_bias"),
        "experts/down_bias": "experts.down_proj_bias",
    },
    "model.layers.{layer}.mlp",
)
_OSS_TENSORS = {
    **ENDS,
    **blocks(ATTENTION, NORMS),
    "layers/{layer}/self_attn/sinks": "model.layers.{layer}.self_attn.sinks",
    **_OSS_BANK,
}
_OSS_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}


def _gpt_oss(fields: Fields, config: Fields) -> dict[str, Any]:
    """Every second layer has a window, the first one among them. Biases are the rule."""
    kinds = config.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["layers"])
    ]
    said = config.get("rope_parameters") or config.get("rope_scaling")
    rope = config if said else {**config, "rope_scaling": _OSS_YARN}
    bias = bool(config.get("attention_bias", True))
    # Transformers adds the balancing loss if it returns the router's logits. Files say 0.9 and no.
    balances = bool(config.get("output_router_logits", False))
    return {
        "rotary": rotary_of(rope, fields["head_width"], theta=150000.0),
        "qkv_bias": bias,
        "out_bias": bias,
        "sinks": True,
        "experts": ExpertsConfig(
            count=fields["experts"],
            top_k=fields["top_k"],
            hidden=fields["hidden"],
            balance=float(config.get("router_aux_loss_coef", 0.001)) if balances else 0.0,
            bias=True,
            clamp=float(config.get("swiglu_limit", 7.0)),
        ),
        **windows_of(fields, {"sliding_window": 128, **config, "layer_types": kinds}),
    }


GPT_OSS = DecoderFormat(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    **{
        **LAYOUT,
        "tensors": _OSS_TENSORS,
        # Its experts are [in, out] in a file, gate and up in turns.
        "transposed": kernels_of(_OSS_TENSORS) - set(_OSS_BANK) | {"layers/{layer}/router/kernel"},
    },
    fused=(
        _together(*_GATE_UP, groups="config.experts.hidden"),
        _together("experts/gate_bias", "experts/up_bias", groups="config.experts.hidden"),
    ),
    fields={
        **grouped(kv_heads=8, head_width=64, eps=1e-5),
        "experts": Key(name="num_local_experts", default=128),
        "top_k": Key(name="num_experts_per_tok", default=4),
    },
    choices={"swiglu_alpha": (1.702,), **_SILU},
    build=_gpt_oss,
)
