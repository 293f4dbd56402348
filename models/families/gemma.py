"""Gemma 1 to 3, the text alone: norms with 1 + scale, GeGLU, scaled embeddings."""

from typing import Any

from ..rope_scaling import RopeScaling
from ..rotary import Rotary
from .decoder_format import (
    Build,
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    grouped,
    kernels_of,
    rotary_of,
)
from .llama_like import ATTENTION, ENDS, HEAD_NORMS, LAYOUT, NORMS, PERCEPTRON, blocks

_CHOICES = {
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}


def _gemma(fields: Fields, config: Fields) -> dict[str, Any]:
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    return {
        "rotary": rotary_of(config, fields["head_width"]),
        "norm": "rms_plus_one",
        # Files of the first Gemma say "gelu" and mean the function with tanh.
        "activation": "gelu_tanh"
        if config.get("model_type") == "gemma"
        else activation_of(config, key, "gelu_pytorch_tanh"),
        "embed_scale": fields["width"] ** 0.5,
    }


def _scores(config: Fields, score_cap: float | None, logit_cap: float | None) -> dict[str, Any]:
    """Return what concerns scores and logits. `score_cap` and `logit_cap` are used if the config
    has no such keys."""
    return {
        "arrangement": "sandwich",
        "score_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "score_cap": config.get("attn_logit_softcapping", score_cap),
        "logit_cap": config.get("final_logit_softcapping", logit_cap),
    }


def _gemma2(fields: Fields, config: Fields) -> dict[str, Any]:
    """Every second layer has a window, the first one among them."""
    kinds = config.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["layers"])
    ]
    return {
        **_gemma(fields, config),
        **_scores(config, 50.0, 30.0),
        "window": config.get("sliding_window", 4096),
        "windowed": tuple(kind == "sliding_attention" for kind in kinds),
    }


def _gemma3(fields: Fields, config: Fields) -> dict[str, Any]:
    """One layer of several sees all, with wavelengths of its own."""
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(fields["layers"])
    ]
    width = fields["head_width"]
    new = config.get("rope_parameters") or {}
    if "full_attention" in new:
        whole, local = (rotary_of({"rope_parameters": new[kind]}, width) for kind in _KINDS)
    else:
        whole = Rotary(
            theta=float(config.get("rope_theta", 1e6)),
            scaling=RopeScaling.of(config.get("rope_scaling")),
            width=width,
        )
        local = Rotary(theta=float(config.get("rope_local_base_freq", 1e4)), width=width)
    return {
        **_gemma(fields, {**config, "rope_parameters": None, "rope_scaling": None}),
        **_scores(config, None, None),
        "rotary": whole,
        "local_rotary": local,
        "qk_norm": "head",
        "window": config.get("sliding_window", 4096),
        "windowed": tuple(kind == "sliding_attention" for kind in kinds),
    }


_KINDS = ("full_attention", "sliding_attention")
_FEED_FORWARD_NORMS = {x: x for x in ("pre_feedforward_layernorm", "post_feedforward_layernorm")}
_TENSORS = {
    **ENDS,
    **blocks({**ATTENTION, **PERCEPTRON}, {**NORMS, **HEAD_NORMS, **_FEED_FORWARD_NORMS}),
}
_LAYOUT = {**LAYOUT, "tensors": _TENSORS, "transposed": kernels_of(_TENSORS)}


def _family(
    architecture: str, model_type: str, build: Build, *, kv_heads: int, **more: Any
) -> DecoderFormat:
    fields = grouped(kv_heads=kv_heads, head_width=256, tie=True) | more.pop("fields", {})
    return DecoderFormat(
        architecture=architecture,
        model_type=model_type,
        **_LAYOUT,
        fields=fields,
        choices=_CHOICES,
        build=build,
        **more,
    )


GEMMA = _family("GemmaForCausalLM", "gemma", _gemma, kv_heads=16)
GEMMA2 = _family("Gemma2ForCausalLM", "gemma2", _gemma2, kv_heads=4)

# Configs of the first folders say of the text only what is not as in the smallest model.
_GEMMA3_SIZES = {
    "vocab": Key(name="vocab_size", default=262208),
    "layers": Key(name="num_hidden_layers", default=26),
    "width": Key(name="hidden_size", default=2304),
    "heads": Key(name="num_attention_heads", default=8),
    "hidden": Key(name="intermediate_size", default=9216),
    "length": Key(name="max_position_embeddings", default=131072, is_computed=False),
}
GEMMA3 = _family("Gemma3ForCausalLM", "gemma3_text", _gemma3, kv_heads=4, fields=_GEMMA3_SIZES)

_OF_ALL = ("bos_token_id", "eos_token_id", "pad_token_id")


def _text_of_gemma3(config: Fields) -> Fields:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"the config has text_config={text!r}; it must be that of the text")
    return {
        "architectures": [GEMMA3.architecture],
        **{key: config[key] for key in _OF_ALL if key in config},
        **text,
        "model_type": GEMMA3.model_type,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


GEMMA3_IMAGES = _family(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    _gemma3,
    kv_heads=4,
    fields=_GEMMA3_SIZES,
    text=_text_of_gemma3,
    renamed=(
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^(language_model\.model|model\.language_model)\.", "model."),
    ),
    modules=(r"^model\.", "model.language_model."),
    kept=(r"(vision_tower|multi_modal_projector)\..*",),
)
