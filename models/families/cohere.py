"""Cohere and Cohere 2: LayerNorm without bias, one for attention and perceptron; scaled logits."""

from typing import Any

from .decoder_format import (
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    grouped,
    kernels_of,
    rotary_of,
)
from .llama_like import ATTENTION, ENDS, HEAD_NORMS, LAYOUT, PERCEPTRON, biases_of, blocks

_NORMS = {"input_layernorm": "input_layernorm", **HEAD_NORMS}
_TENSORS = {**ENDS, **blocks({**ATTENTION, **PERCEPTRON}, _NORMS)}
_COHERE: dict[str, Any] = {
    **LAYOUT,
    "tensors": _TENSORS,
    "transposed": kernels_of(_TENSORS),
    "fields": {**grouped(tie=True), "eps": Key(name="layer_norm_eps", default=1e-5)},
    "choices": {},
}


def _plain(fields: Fields, config: Fields, theta: float) -> dict[str, Any]:
    return {
        "norm": "layer_no_bias",
        "arrangement": "parallel_one_norm",
        "rotary": rotary_of(config, fields["head_width"], pairs="neighbours", theta=theta),
        "activation": activation_of(config),
        "logit_scale": float(config.get("logit_scale", 0.0625)),
        **biases_of(config),
        "mlp_bias": False,
    }


def _cohere2(fields: Fields, config: Fields) -> dict[str, Any]:
    """Three of four layers have a window and positions, the others neither."""
    every, window = config.get("sliding_window_pattern", 4), config.get("sliding_window", 4096)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(fields["layers"])
    ]
    windowed = tuple(kind == "sliding_attention" for kind in kinds)
    if any(windowed) and window is None:
        raise ValueError(
            "the config has sliding_window=null, and layers with a window; it must not"
        )
    windows = {"window": window, "windowed": windowed} if any(windowed) else {}
    return {**_plain(fields, config, 1e4), **windows, "rotated": windowed}


COHERE = DecoderFormat(
    architecture="CohereForCausalLM",
    model_type="cohere",
    **_COHERE,
    build=lambda fields, config: {
        **_plain(fields, config, 5e5),
        "qk_norm": "heads" if config.get("use_qk_norm") else None,
    },
)
COHERE2 = DecoderFormat(
    architecture="Cohere2ForCausalLM", model_type="cohere2", **_COHERE, build=_cohere2
)
