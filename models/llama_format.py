"""Llama in Hugging Face's format: LlamaForCausalLM. Its weights are [out, in]."""

from .format import Extra, Format, Key
from .rope_config import rope_of_config, rope_to_config

_PRODUCTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_BIASES = {
    f"layers/{{layer}}/{name.replace('.', '/')}/bias": f"model.layers.{{layer}}.{name}.bias"
    for name in _PRODUCTS
}
_KERNELS = {
    f"layers/{{layer}}/{name.replace('.', '/')}/kernel": f"model.layers.{{layer}}.{name}.weight"
    for name in _PRODUCTS
}

FORMAT = Format(
    architecture="LlamaForCausalLM",
    model_type="llama",
    layer="layers/{layer}",
    stack="layers",
    tensors={
        "embed_tokens/embedding": "model.embed_tokens.weight",
        "layers/{layer}/input_layernorm/scale": "model.layers.{layer}.input_layernorm.weight",
        **_KERNELS,
        **_BIASES,
        "layers/{layer}/post_attention_layernorm/scale": (
            "model.layers.{layer}.post_attention_layernorm.weight"
        ),
        "norm/scale": "model.norm.weight",
        "lm_head": "lm_head.weight",
    },
    transposed=frozenset(_KERNELS),
    prefix="model.",
    # Older versions of Transformers saved the wavelengths with the weights.
    ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq"),
    embedding="embed_tokens/embedding",
    head="lm_head",
    fields={
        "vocab": Key(name="vocab_size", default=32000),
        "layers": Key(name="num_hidden_layers", default=32),
        "width": Key(name="hidden_size", default=4096),
        "heads": Key(name="num_attention_heads", default=32),
        "kv_heads": Key(name="num_key_value_heads", null=lambda fields: fields["heads"]),
        "head_width": Key(
            name="head_dim",
            null=lambda fields: fields["width"] // fields["heads"],
        ),
        "attention_bias": Key(name="attention_bias", default=False),
        "mlp_bias": Key(name="mlp_bias", default=False),
        "hidden": Key(name="intermediate_size", default=11008),
        "eps": Key(name="rms_norm_eps", default=1e-6),
        "length": Key(name="max_position_embeddings", default=2048, is_computed=False),
        "tie": Key(name="tie_word_embeddings", default=False),
    },
    attributes={
        "attention_bias": "config.qkv_bias",
        "theta": "config.rotary.theta",
        "rope_scaling": "config.rotary.scaling",
    },
    fields_in="config",
    extra=Extra(
        names=("theta", "rope_scaling"),
        read=rope_of_config,
        write=lambda fields: rope_to_config(fields["theta"], fields["rope_scaling"]),
    ),
    choices={
        "hidden_act": ("silu", "swish"),  # two names of one function
        "partial_rotary_factor": (None, 1.0),
    },
)
