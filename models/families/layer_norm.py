"""GPT-NeoX, GPT-J, OPT and BLOOM: decoders with LayerNorm and plain perceptrons with biases."""

from typing import Any

from ..format import Fused
from .decoder_format import (
    HIDDEN,
    LAYER_NORM,
    LENGTH,
    SIZES,
    TIE,
    DecoderFormat,
    Fields,
    Key,
    activation_of,
    kernels_of,
    layer_paths,
    rotary_of,
    with_biases,
    with_norms,
)

_TIED = {"tie": Key(name="tie_word_embeddings", default=True)}


def _plain(fields: Fields) -> dict[str, Any]:
    """Return what these families have in common: a head for each query, no gate, biases."""
    return {
        "kv_heads": fields["heads"],
        "head_width": fields["width"] // fields["heads"],
        "norm": "layer",
        "is_gated": False,
        "mlp_bias": True,
    }


def _layout(tensors: dict[str, str], prefix: str, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "layer": "layers/{layer}",
        "stack": "layers",
        "tensors": tensors,
        "transposed": kernels_of(tensors),
        "prefix": prefix,
        "ignored": ignored,
        "embedding": "embed_tokens/embedding",
        "head": "lm_head",
    }


def _fused_qkv(tensor: str) -> tuple[dict[str, str], tuple[Fused, ...]]:
    """Return the tensors of queries, keys and values that stand together head by head."""
    leaves = {
        kind: tuple(f"layers/{{layer}}/self_attn/{x}_proj/{kind}" for x in "qkv")
        for kind in ("kernel", "bias")
    }
    suffix = {"kernel": "weight", "bias": "bias"}
    names = {leaf: f"{tensor}.{suffix[kind]}" for kind, own in leaves.items() for leaf in own}
    fused = (Fused(leaves=own, groups="config.heads") for own in leaves.values())
    return names, tuple(fused)


_NEOX_QKV, _NEOX_FUSED = _fused_qkv("gpt_neox.layers.{layer}.attention.query_key_value")
_NEOX_TENSORS = {
    "embed_tokens/embedding": "gpt_neox.embed_in.weight",
    **with_norms({"norm": "gpt_neox.final_layer_norm"}),
    "lm_head": "embed_out.weight",
    **_NEOX_QKV,
    **layer_paths(
        {
            **with_norms({x: x for x in ("input_layernorm", "post_attention_layernorm")}),
            **with_biases(
                {
                    "self_attn/o_proj": "attention.dense",
                    "mlp/up_proj": "mlp.dense_h_to_4h",
                    "mlp/down_proj": "mlp.dense_4h_to_h",
                }
            ),
        },
        "gpt_neox.layers.{layer}",
    ),
}


def _neox(fields: Fields, config: Fields) -> dict[str, Any]:
    plain = _plain(fields)
    if "rotary_emb_base" in config and "rope_theta" not in config:
        config = {**config, "rope_theta": config["rotary_emb_base"]}
    bias = bool(config.get("attention_bias", True))
    return {
        **plain,
        "arrangement": "parallel" if config.get("use_parallel_residual", True) else "sequential",
        "rotary": rotary_of(config, plain["head_width"], share=config.get("rotary_pct", 0.25)),
        "activation": activation_of(config, default="gelu"),
        "qkv_bias": bias,
        "out_bias": bias,
    }


GPT_NEOX = DecoderFormat(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    **_layout(
        _NEOX_TENSORS,
        "gpt_neox.",
        # Older versions of Transformers saved masks and wavelengths with the weights.
        (r"layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
    ),
    fused=_NEOX_FUSED,
    fields={
        **{**SIZES, **HIDDEN, **LENGTH, **TIE},
        "eps": Key(name="layer_norm_eps", default=1e-5),
    },
    choices={},
    build=_neox,
)

_GPTJ_TENSORS = {
    "embed_tokens/embedding": "transformer.wte.weight",
    **with_norms({"norm": "transformer.ln_f"}),
    "lm_head": "lm_head.weight",
    "lm_head_bias": "lm_head.bias",
    **layer_paths(
        {
            **with_norms({"input_layernorm": "ln_1"}),
            **{f"self_attn/{x}_proj/kernel": f"attn.{x}_proj.weight" for x in "qkv"},
            "self_attn/o_proj/kernel": "attn.out_proj.weight",
            **with_biases({"mlp/up_proj": "mlp.fc_in", "mlp/down_proj": "mlp.fc_out"}),
        },
        "transformer.h.{layer}",
    ),
}


def _gptj(fields: Fields, config: Fields) -> dict[str, Any]:
    plain = _plain(fields)
    head = plain["head_width"]
    return {
        **plain,
        "arrangement": "parallel_one_norm",
        "rotary": rotary_of({}, head, share=fields["rotary"] / head, pairs="neighbours"),
        "activation": activation_of(config, "activation_function", "gelu_new"),
        "head_bias": True,
    }


_GPT_SIZES = {
    "vocab": Key(name="vocab_size"),
    "layers": Key(name="n_layer"),
    "width": Key(name="n_embd"),
    "heads": Key(name="n_head"),
}

GPTJ = DecoderFormat(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    **_layout(_GPTJ_TENSORS, "transformer.", (r"h\.\d+\.attn\.(masked_)?bias",)),
    fields={
        **_GPT_SIZES,
        "hidden": Key(name="n_inner", null=lambda fields: 4 * fields["width"]),
        "length": Key(name="n_positions", default=2048, is_computed=False),
        "rotary": Key(
            name="rotary_dim", default=64, null=lambda fields: fields["width"] // fields["heads"]
        ),
        **LAYER_NORM,
    },
    choices={"tie_word_embeddings": (False,)},
    build=_gptj,
)

_OPT_TENSORS = {
    "embed_tokens/embedding": "model.decoder.embed_tokens.weight",
    "embed_positions/embedding": "model.decoder.embed_positions.weight",
    **with_norms({"norm": "model.decoder.final_layer_norm"}),
    "lm_head": "lm_head.weight",
    **layer_paths(
        {
            **with_norms(
                {
                    "input_layernorm": "self_attn_layer_norm",
                    "post_attention_layernorm": "final_layer_norm",
                }
            ),
            **with_biases(
                {
                    **{f"self_attn/{x}_proj": f"self_attn.{x}_proj" for x in "qkv"},
                    "self_attn/o_proj": "self_attn.out_proj",
                    "mlp/up_proj": "fc1",
                    "mlp/down_proj": "fc2",
                }
            ),
        },
        "model.decoder.layers.{layer}",
    ),
}


def _opt(fields: Fields, config: Fields) -> dict[str, Any]:
    inner = config.get("word_embed_proj_dim", fields["width"])
    if inner != fields["width"]:
        raise ValueError(
            f"the config has word_embed_proj_dim={inner} and hidden_size={fields['width']}; the "
            "model computes embeddings of its own width alone"
        )
    return {
        **_plain(fields),
        "positions": "learned",
        "first_position": 2,
        "activation": activation_of(config, "activation_function", "relu"),
        "qkv_bias": True,
        "out_bias": True,
        "eps": 1e-5,
    }


OPT = DecoderFormat(
    architecture="OPTForCausalLM",
    model_type="opt",
    **_layout(_OPT_TENSORS, "model."),
    fields={
        **SIZES,
        "hidden": Key(name="ffn_dim"),
        "length": Key(name="max_position_embeddings", default=2048),
        **_TIED,
    },
    choices={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "enable_bias": (True,),
        "layer_norm_elementwise_affine": (True,),
    },
    build=_opt,
)

_BLOOM_QKV, _BLOOM_FUSED = _fused_qkv("transformer.h.{layer}.self_attention.query_key_value")
_BLOOM_TENSORS = {
    "embed_tokens/embedding": "transformer.word_embeddings.weight",
    **with_norms(
        {"embed_norm": "transformer.word_embeddings_layernorm", "norm": "transformer.ln_f"}
    ),
    "lm_head": "lm_head.weight",
    **_BLOOM_QKV,
    **layer_paths(
        {
            **with_norms({x: x for x in ("input_layernorm", "post_attention_layernorm")}),
            **with_biases(
                {
                    "self_attn/o_proj": "self_attention.dense",
                    "mlp/up_proj": "mlp.dense_h_to_4h",
                    "mlp/down_proj": "mlp.dense_4h_to_h",
                }
            ),
        },
        "transformer.h.{layer}",
    ),
}

BLOOM = DecoderFormat(
    architecture="BloomForCausalLM",
    model_type="bloom",
    **_layout(_BLOOM_TENSORS, "transformer."),
    fused=_BLOOM_FUSED,
    fields={
        "vocab": Key(name="vocab_size"),
        "layers": Key(name="n_layer"),
        "width": Key(name="hidden_size"),
        "heads": Key(name="n_head"),
        **LAYER_NORM,
        **_TIED,
    },
    choices={
        "apply_residual_connection_post_layernorm": (False,),
        "slow_but_exact": (False, True),  # another order of the same sums
    },
    build=lambda fields, config: {
        **_plain(fields),
        "hidden": 4 * fields["width"],
        "positions": "alibi",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "out_bias": True,
        "embed_norm": True,
    },
)
