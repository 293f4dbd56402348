"""BERT in Hugging Face's format: BertForMaskedLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .families.decoder_format import activation_of, kernels_of, layer_paths, with_biases, with_norms
from .format import Extra, Format, Key

_TENSORS = {
    "embed_tokens/embedding": "bert.embeddings.word_embeddings.weight",
    "embed_positions/embedding": "bert.embeddings.position_embeddings.weight",
    "embed_types/embedding": "bert.embeddings.token_type_embeddings.weight",
    **with_norms(
        {
            "embed_norm": "bert.embeddings.LayerNorm",
            "head_norm": "cls.predictions.transform.LayerNorm",
        }
    ),
    **with_biases({"head_dense": "cls.predictions.transform.dense"}),
    "head_bias": "cls.predictions.bias",
    # A tied head, which some files hold too.
    "head": "cls.predictions.decoder.weight",
    **layer_paths(
        {
            **with_norms(
                {
                    "self_attn_norm": "attention.output.LayerNorm",
                    "mlp_norm": "output.LayerNorm",
                }
            ),
            **with_biases(
                {
                    "self_attn/q_proj": "attention.self.query",
                    "self_attn/k_proj": "attention.self.key",
                    "self_attn/v_proj": "attention.self.value",
                    "self_attn/o_proj": "attention.output.dense",
                    "mlp/up_proj": "intermediate.dense",
                    "mlp/down_proj": "output.dense",
                }
            ),
        },
        "bert.encoder.layer.{layer}",
    ),
}


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"activation": activation_of(config, default="gelu")}


def _written(model: Any) -> dict[str, Any]:
    """Return the keys of the config that the model was built from, if it was."""
    return json.loads(model.config.source or "{}")


BERT = Format(
    architecture="BertForMaskedLM",
    model_type="bert",
    layer="layers/{layer}",
    stack="layers",
    tensors=_TENSORS,
    transposed=kernels_of(_TENSORS),
    prefix="bert.",
    # The pooler and the prediction of the next sentence are no part of a masked language model, and
    # older versions of Transformers saved positions and the tied bias a second time.
    ignored=(
        r"embeddings\.position_ids",
        r"pooler\..*",
        r"cls\.seq_relationship\..*",
        r"cls\.predictions\.decoder\.bias",
    ),
    embedding="embed_tokens/embedding",
    head="head",
    fields={
        "vocab": Key(name="vocab_size", default=30522),
        "layers": Key(name="num_hidden_layers", default=12),
        "width": Key(name="hidden_size", default=768),
        "heads": Key(name="num_attention_heads", default=12),
        "hidden": Key(name="intermediate_size", default=3072),
        "length": Key(name="max_position_embeddings", default=512),
        "token_types": Key(name="type_vocab_size", default=2),
        "eps": Key(name="layer_norm_eps", default=1e-12),
    },
    fields_in="config",
    attributes={"activation": "config.activation"},
    extra=Extra(
        names=("activation",),
        read=_read,
        write=lambda fields: {
            "hidden_act": {"gelu_tanh": "gelu_new"}.get(fields["activation"], fields["activation"])
        },
    ),
    choices={
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "position_embedding_type": ("absolute",),
        "quantization_config": (None,),
    },
    written=_written,
)
