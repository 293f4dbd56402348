"""Families of models that `Decoder` computes, as data: each is a `DecoderFormat`."""

from .decoder_format import DecoderFormat
from .experts import MIXTRAL, QWEN3_MOE
from .gemma import GEMMA, GEMMA2, GEMMA3
from .layer_norm import BLOOM, GPT_NEOX, GPTJ, OPT
from .llama_like import CHATGLM, GLM, MISTRAL, PHI3, QWEN2, QWEN3

FAMILIES: dict[str, DecoderFormat] = {
    family.model_type: family
    for family in (
        *(MISTRAL, QWEN2, QWEN3, PHI3, GLM, CHATGLM),
        *(GEMMA, GEMMA2, GEMMA3),
        *(MIXTRAL, QWEN3_MOE),
        *(GPT_NEOX, GPTJ, OPT, BLOOM),
    )
}
"""The families by the name that a config.json calls `model_type`."""

__all__ = ["FAMILIES", "DecoderFormat"]
