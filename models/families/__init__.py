"""Families of models that `Decoder` computes, as data: each is a `DecoderFormat`."""

from .cohere import COHERE, COHERE2
from .decoder_format import DecoderFormat
from .deepseek import DEEPSEEK_V3
from .experts import GPT_OSS, GRANITE_MOE, MIXTRAL, QWEN3_MOE
from .gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES
from .layer_norm import BLOOM, GPT_NEOX, GPTJ, OPT
from .llama_like import (
    CHATGLM,
    GLM,
    GRANITE,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)

FAMILIES: dict[str, DecoderFormat] = {
    family.model_type: family
    for family in (
        *(MISTRAL, QWEN2, QWEN3, PHI3, GLM, CHATGLM),
        *(GRANITE, SMOLLM3, OLMO2, OLMO3, COHERE, COHERE2),
        *(GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES),
        *(MIXTRAL, QWEN3_MOE, GRANITE_MOE, GPT_OSS, DEEPSEEK_V3),
        *(GPT_NEOX, GPTJ, OPT, BLOOM),
    )
}
"""The families by the name that a config.json calls `model_type`."""

__all__ = ["FAMILIES", "DecoderFormat"]
