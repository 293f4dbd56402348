"""Decoders with RMSNorm, grouped heads and SwiGLU: Mistral, Qwen2, Qwen3, Phi-3, GLM, ChatGLM,
Granite, SmolLM3, OLMo 2 and 3."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..format import Fused
from .decoder_format import (
    SIZES,
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    grouped,
    kernels_of,
    layer_paths,
    rotary_of,
    with_biases,
    with_norms,
)

ATTENTION = {f"self_attn/{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"}
PERCEPTRON = {f"mlp/{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
NORMS = {x: x for x in ("input_layernorm", "post_attention_layernorm")}
HEAD_NORMS = {f"self_attn/{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
ENDS = {
    "embed_tokens/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
IGNORED = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
"""Older versions of Transformers saved the wavelengths with the weights."""


def blocks(products: Mapping[str, str], norms: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors of blocks that are named as in Llama."""
    return layer_paths({**with_biases(products), **with_norms(norms)}, "model.layers.{layer}")


def windows_of(fields: Fields, config: Fields) -> dict[str, Any]:
    """Return the window of a config, and the layers that have it.

    "layer_types" names the kind of each layer. Without it all layers have the window.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None:
        return {}
    if kinds is None:
        kinds = ["sliding_attention"] * fields["layers"]
    return {"window": window, "windowed": tuple(x == "sliding_attention" for x in kinds)}


def _plain(fields: Fields, config: Fields) -> dict[str, Any]:
    return {
        "rotary": rotary_of(config, fields["head_width"]),
        "activation": activation_of(config),
        **windows_of(fields, config),
    }


def _qwen(fields: Fields, config: Fields) -> dict[str, Any]:
    """Its configs have a window only if "use_sliding_window" says so. Older ones count the layers
    without it in "max_window_layers"."""
    own = {"sliding_window": 4096, **config}
    if not config.get("use_sliding_window"):
        own["sliding_window"] = None
    elif config.get("layer_types") is None:
        first, layers = config.get("max_window_layers", 28), range(fields["layers"])
        own["layer_types"] = ["sliding_attention" if i >= first else "full" for i in layers]
    return _plain(fields, own)


_LLAMA_TENSORS = {**ENDS, **blocks({**ATTENTION, **PERCEPTRON}, {**NORMS, **HEAD_NORMS})}

LAYOUT: dict[str, Any] = {
    "layer": "layers/{layer}",
    "stack": "layers",
    "tensors": _LLAMA_TENSORS,
    "transposed": kernels_of(_LLAMA_TENSORS),
    "prefix": "model.",
    "ignored": IGNORED,
    "embedding": "embed_tokens/embedding",
    "head": "lm_head",
}
"""Where a file of a family that is named as in Llama has what."""

MISTRAL = DecoderFormat(
    architecture="MistralForCausalLM",
    model_type="mistral",
    **LAYOUT,
    fields=grouped(kv_heads=8),
    choices={},
    # A config that says nothing of a window has the one of the first Mistral.
    build=lambda fields, config: _plain(fields, {"sliding_window": 4096, **config}),
)

QWEN2 = DecoderFormat(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    **LAYOUT,
    fields=grouped(kv_heads=32),
    choices={},
    build=lambda fields, config: {**_qwen(fields, config), "qkv_bias": True},
)

QWEN3 = DecoderFormat(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    **LAYOUT,
    fields=grouped(kv_heads=32, head_width=128),
    choices={"attention_bias": (False,)},
    build=lambda fields, config: {**_qwen(fields, config), "qk_norm": "head"},
)


def _fused(tensor: str, leaves: tuple[str, ...]) -> dict[str, str]:
    return {f"layers/{{layer}}/{leaf}": f"model.layers.{{layer}}.{tensor}" for leaf in leaves}


_QKV = tuple(f"self_attn/{x}_proj/kernel" for x in "qkv")
_GATE_UP = ("mlp/gate_proj/kernel", "mlp/up_proj/kernel")
_PHI3_TENSORS = {
    **_LLAMA_TENSORS,
    **_fused("self_attn.qkv_proj.weight", _QKV),
    **_fused("mlp.gate_up_proj.weight", _GATE_UP),
}
_IN_LAYER = "layers/{layer}/"
_FUSED_GATE = Fused(leaves=tuple(_IN_LAYER + leaf for leaf in _GATE_UP))


def _phi3(fields: Fields, config: Fields) -> dict[str, Any]:
    """Its configs have the length of the first training beside the scaling of positions."""
    original = config.get("original_max_position_embeddings")
    config = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if original is not None and scaling and "long_factor" in scaling:
            factor = fields["length"] / original
            more = {"original_max_position_embeddings": original, "factor": factor}
            config[key] = {**scaling, **more}
    return _plain(fields, config)


PHI3 = DecoderFormat(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    **{**LAYOUT, "tensors": _PHI3_TENSORS, "transposed": kernels_of(_PHI3_TENSORS)},
    fused=(Fused(leaves=tuple(_IN_LAYER + leaf for leaf in _QKV)), _FUSED_GATE),
    fields=grouped(eps=1e-5),
    choices={},
    build=_phi3,
)

_GLM_TENSORS = {**_LLAMA_TENSORS, **_fused("mlp.gate_up_proj.weight", _GATE_UP)}

GLM = DecoderFormat(
    architecture="GlmForCausalLM",
    model_type="glm",
    **{**LAYOUT, "tensors": _GLM_TENSORS, "transposed": kernels_of(_GLM_TENSORS)},
    fused=(_FUSED_GATE,),
    fields=grouped(kv_heads=2, head_width=128, eps=1.5625e-7),
    choices={},
    build=lambda fields, config: {
        "rotary": rotary_of(config, fields["head_width"], share=0.5, pairs="neighbours"),
        "activation": activation_of(config),
        "qkv_bias": bool(config.get("attention_bias", True)),
    },
)

_CHATGLM = "transformer.encoder.layers.{layer}."
_CHATGLM_TENSORS = {
    "embed_tokens/embedding": "transformer.embedding.word_embeddings.weight",
    "norm/scale": "transformer.encoder.final_layernorm.weight",
    "lm_head": "transformer.output_layer.weight",
    **layer_paths(with_norms(NORMS), _CHATGLM.rstrip(".")),
    **{
        f"{_IN_LAYER}self_attn/{x}_proj/{leaf}": f"{_CHATGLM}self_attention.query_key_value.{name}"
        for x in "qkv"
        for leaf, name in (("kernel", "weight"), ("bias", "bias"))
    },
    f"{_IN_LAYER}self_attn/o_proj/kernel": f"{_CHATGLM}self_attention.dense.weight",
    **{_IN_LAYER + leaf: f"{_CHATGLM}mlp.dense_h_to_4h.weight" for leaf in _GATE_UP},
    f"{_IN_LAYER}mlp/down_proj/kernel": f"{_CHATGLM}mlp.dense_4h_to_h.weight",
}


def _chatglm(fields: Fields, config: Fields) -> dict[str, Any]:
    """Half of each head is rotated, its neighbours together; queries share few keys and values."""
    width = fields["head_width"]
    ratio = float(config.get("rope_ratio") or 1)
    groups = config.get("multi_query_group_num", 1)
    return {
        "kv_heads": groups if config.get("multi_query_attention") else fields["heads"],
        "rotary": rotary_of({}, width, share=0.5, pairs="neighbours", theta=10000.0 * ratio),
        "qkv_bias": bool(config.get("add_qkv_bias", config.get("add_bias_linear", False))),
        "tie": False,
    }


CHATGLM = DecoderFormat(
    architecture="ChatGLMModel",
    model_type="chatglm",
    **{
        **LAYOUT,
        "tensors": _CHATGLM_TENSORS,
        "transposed": kernels_of(_CHATGLM_TENSORS),
        "prefix": "transformer.",
        "ignored": (r"rotary_pos_emb\.inv_freq",),
    },
    fused=(
        *(
            Fused(leaves=tuple(f"{_IN_LAYER}self_attn/{x}_proj/{leaf}" for x in "qkv"))
            for leaf in ("kernel", "bias")
        ),
        _FUSED_GATE,
    ),
    fields={
        **{**SIZES, "layers": Key(name="num_layers"), "vocab": Key(name="padded_vocab_size")},
        "hidden": Key(name="ffn_hidden_size"),
        "head_width": Key(
            name="kv_channels", null=lambda fields: fields["width"] // fields["heads"]
        ),
        "length": Key(name="seq_length", default=2048, is_computed=False),
        "eps": Key(name="layernorm_epsilon", default=1e-5),
    },
    choices={
        "rmsnorm": (True,),
        "post_layer_norm": (True,),
        "add_bias_linear": (False,),
        "apply_residual_connection_post_layernorm": (False,),
    },
    build=_chatglm,
)


def biases_of(config: Fields) -> dict[str, bool]:
    """Return the biases of a config with Llama's two keys."""
    attention, perceptron = (bool(config.get(f"{x}_bias", False)) for x in ("attention", "mlp"))
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": perceptron}


def multipliers_of(config: Fields) -> dict[str, float]:
    """Return what Granite's configs multiply numbers with; absent keys mean 1, of scores too."""

    def value(key: str) -> float:
        return float(config.get(key, 1.0))

    return {
        "embed_scale": value("embedding_multiplier"),
        "residual_scale": value("residual_multiplier"),
        "score_scale": value("attention_multiplier"),
        "logit_scale": 1 / value("logits_scaling"),
    }


GRANITE = DecoderFormat(
    architecture="GraniteForCausalLM",
    model_type="granite",
    **LAYOUT,
    fields=grouped(),
    choices={},
    build=lambda fields, config: {
        "rotary": rotary_of(config, fields["head_width"]),
        "activation": activation_of(config),
        **biases_of(config),
        **multipliers_of(config),
    },
)


def _smollm3(fields: Fields, config: Fields) -> dict[str, Any]:
    """Every fourth layer has no positions. Only these may have a window."""
    every, layers = config.get("no_rope_layer_interval", 4), range(fields["layers"])
    said = config.get("no_rope_layers")  # 1 means that the layer does have positions
    rotated = [bool((i + 1) % every) if said is None else bool(said[i]) for i in layers]
    kinds = config.get("layer_types")
    if kinds is None:
        can_slide = config.get("use_sliding_window", False)
        kinds = ["full" if own or not can_slide else "sliding_attention" for own in rotated]
    windows = windows_of(fields, {**config, "layer_types": kinds})
    return {
        "rotary": rotary_of(config, fields["head_width"], theta=2e6),
        "rotated": () if all(rotated) else tuple(rotated),
        "activation": activation_of(config),
        **biases_of(config),
        **(windows if "sliding_attention" in kinds else {}),
    }


SMOLLM3 = DecoderFormat(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    **LAYOUT,
    fields=grouped(kv_heads=4, tie=True),
    choices={},
    build=_smollm3,
)

_OLMO_NORMS = {x: x for x in ("post_attention_layernorm", "post_feedforward_layernorm")}
_OLMO_TENSORS = {**ENDS, **blocks({**ATTENTION, **PERCEPTRON}, {**_OLMO_NORMS, **HEAD_NORMS})}
_OLMO: dict[str, Any] = {
    **LAYOUT,
    "tensors": _OLMO_TENSORS,
    "transposed": kernels_of(_OLMO_TENSORS),
    "fields": grouped(eps=1e-5),
    "choices": {},
}


def _olmo2(fields: Fields, config: Fields) -> dict[str, Any]:
    return {
        "arrangement": "norms_after",
        "qk_norm": "all",
        "activation": activation_of(config),
        **biases_of(config),
        "mlp_bias": False,
    }


def _olmo3(fields: Fields, config: Fields) -> dict[str, Any]:
    """Three of four layers have a window. Scaling of positions is for the others alone."""
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(fields["layers"])
    ]
    width, parameters = fields["head_width"], config.get("rope_parameters") or {}
    if "full_attention" in parameters or "sliding_attention" in parameters:
        whole, local = (
            rotary_of({"rope_parameters": parameters.get(kind)}, width, theta=5e5)
            for kind in ("full_attention", "sliding_attention")
        )
    else:
        whole = rotary_of(config, width, theta=5e5)
        local = dataclasses.replace(whole, scaling=None)
    return {
        **_olmo2(fields, config),
        **windows_of(fields, {"sliding_window": 4096, **config, "layer_types": kinds}),
        "rotary": whole,
        "local_rotary": None if local == whole else local,
    }


OLMO2 = DecoderFormat(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    **_OLMO,
    build=lambda fields, config: {
        **_olmo2(fields, config),
        "rotary": rotary_of(config, fields["head_width"]),
    },
)
OLMO3 = DecoderFormat(architecture="Olmo3ForCausalLM", model_type="olmo3", **_OLMO, build=_olmo3)
