"""Mixtral and Qwen3-MoE: decoders with a mixture of experts in the place of perceptrons."""

from typing import Any

from ..decoder_config import ExpertsConfig
from .decoder_format import (
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    grouped,
    kernels_of,
    layer_paths,
    rotary_of,
)
from .llama_like import ATTENTION, ENDS, HEAD_NORMS, LAYOUT, NORMS, PERCEPTRON, blocks, windows_of


def _bank(router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Return the tensors of the experts of each block."""
    names = {"router/kernel": router, "experts/gate_proj": gate, "experts/up_proj": up}
    return layer_paths({**names, "experts/down_proj": down}, "model.layers.{layer}")


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
        "activation": activation_of(config),
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
    choices={},
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
        "activation": activation_of(config),
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
    choices={"attention_bias": (False,)},
    build=_qwen3_moe,
)
