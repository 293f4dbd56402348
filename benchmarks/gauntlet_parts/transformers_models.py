"""The Flax classes of transformers 4.53, the last release that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import VOCABULARY, cross_entropy, floats, to_waves, tokens
from gauntlet_parts.transformers_calls import (
    caller,
    encoder,
    encoder_decoder,
    images,
    language_model,
    logits_of,
    module_of,
)

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GATED = {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2}
ENCODER = {**WIDE, "intermediate_size": 48}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
SEEN = {"image_size": 16, "patch_size": 8, "num_labels": 5}
POSITIONS = {"max_position_embeddings": 40}


def resnet(model: str, config: str) -> Built:
    return images(
        model,
        config,
        size=32,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_labels=5,
        **({"layer_type": "basic"} if config == "ResNetConfig" else {"groups_width": 4}),
    )


def clip() -> Built:
    vision = {**ENCODER, "image_size": 16, "patch_size": 8}
    text = {**ENCODER, **POSITIONS, "vocab_size": VOCABULARY, "eos_token_id": 2}
    module = module_of(
        "FlaxCLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16
    )
    call = caller(module)

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        rows = {"input_ids": batch["tokens"], "pixel_values": batch["image"]}
        scores = call(apply, rows, train).logits_per_image
        return cross_entropy(scores, jnp.arange(len(scores)))

    batch = {"tokens": tokens(8), "image": floats(16, 16, 3)}
    # Its scores are multiplied by 14: a larger rate diverges.
    return Built(model=module, loss=loss, batch=batch, rate=1e-3)


def whisper() -> Built:
    module = module_of(
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **BART,
    )
    call = caller(module)

    def loss(apply: Any, batch: Mapping[str, Any], *, train: bool) -> Any:
        row = batch["target"]
        rows = {"input_features": batch["sound"], "decoder_input_ids": row[:, :-1]}
        return cross_entropy(logits_of(call(apply, rows, train)), row[:, 1:])

    return Built(model=module, loss=loss, batch={"sound": floats(8, 24), "target": tokens(7)})


def wav2vec2() -> Built:
    module = module_of(
        "FlaxWav2Vec2Model",
        "Wav2Vec2Config",
        conv_dim=(16, 16),
        conv_kernel=(4, 3),
        conv_stride=(2, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        mask_time_prob=0.0,
        **ENCODER,
    )

    def outputs(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
        return apply(batch["sound"], deterministic=not train)[0]

    return Built(model=module, loss=to_waves(outputs), batch={"sound": floats(80)})


LANGUAGE: dict[str, Callable[[], Built]] = {
    "GPT-2": lambda: language_model(
        "FlaxGPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=2, n_positions=40
    ),
    "GPT-J": lambda: language_model(
        "FlaxGPTJForCausalLM",
        "GPTJConfig",
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=40,
        rotary_dim=8,
    ),
    "GPT-Neo": lambda: language_model(
        "FlaxGPTNeoForCausalLM",
        "GPTNeoConfig",
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
        **POSITIONS,
    ),
    "OPT": lambda: language_model(
        "FlaxOPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32, **WIDE, **POSITIONS
    ),
    "BLOOM": lambda: language_model(
        "FlaxBloomForCausalLM", "BloomConfig", hidden_size=32, n_layer=2, n_head=2
    ),
    "Llama": lambda: language_model("FlaxLlamaForCausalLM", "LlamaConfig", **GATED, **POSITIONS),
    "Mistral": lambda: language_model(
        "FlaxMistralForCausalLM",
        "MistralConfig",
        **{**GATED, "num_key_value_heads": 1},
        **POSITIONS,
    ),
    "Gemma": lambda: language_model(
        "FlaxGemmaForCausalLM", "GemmaConfig", head_dim=16, **GATED, **POSITIONS
    ),
    "XGLM": lambda: language_model(
        "FlaxXGLMForCausalLM",
        "XGLMConfig",
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=2,
        **POSITIONS,
    ),
    "BERT, causal": lambda: language_model(
        "FlaxBertForCausalLM", "BertConfig", is_decoder=True, **ENCODER, **POSITIONS
    ),
    "RoBERTa, causal": lambda: language_model(
        "FlaxRobertaForCausalLM", "RobertaConfig", is_decoder=True, **ENCODER, **POSITIONS
    ),
}

ENCODERS: dict[str, Callable[[], Built]] = {
    "BERT": lambda: encoder("FlaxBertForMaskedLM", "BertConfig", **ENCODER, **POSITIONS),
    "RoBERTa": lambda: encoder("FlaxRobertaForMaskedLM", "RobertaConfig", **ENCODER, **POSITIONS),
    "ALBERT": lambda: encoder(
        "FlaxAlbertForMaskedLM", "AlbertConfig", embedding_size=16, **ENCODER, **POSITIONS
    ),
    "ELECTRA": lambda: encoder(
        "FlaxElectraForMaskedLM", "ElectraConfig", embedding_size=16, **ENCODER, **POSITIONS
    ),
    "DistilBERT": lambda: encoder(
        "FlaxDistilBertForMaskedLM",
        "DistilBertConfig",
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=48,
        **POSITIONS,
    ),
    "RoFormer": lambda: encoder(
        "FlaxRoFormerForMaskedLM", "RoFormerConfig", embedding_size=32, **ENCODER, **POSITIONS
    ),
    "BigBird": lambda: encoder(
        "FlaxBigBirdForMaskedLM",
        "BigBirdConfig",
        attention_type="original_full",
        **ENCODER,
        **POSITIONS,
    ),
}

BOTH: dict[str, Callable[[], Built]] = {
    "T5": lambda: encoder_decoder("FlaxT5ForConditionalGeneration", "T5Config", **T5),
    "LongT5": lambda: encoder_decoder(
        "FlaxLongT5ForConditionalGeneration", "LongT5Config", local_radius=4, **T5
    ),
    "BART": lambda: encoder_decoder(
        "FlaxBartForConditionalGeneration", "BartConfig", **BART, **POSITIONS
    ),
    "mBART": lambda: encoder_decoder(
        "FlaxMBartForConditionalGeneration", "MBartConfig", **BART, **POSITIONS
    ),
    "Marian": lambda: encoder_decoder(
        "FlaxMarianMTModel", "MarianConfig", pad_token_id=0, **BART, **POSITIONS
    ),
    "Pegasus": lambda: encoder_decoder(
        "FlaxPegasusForConditionalGeneration", "PegasusConfig", **BART, **POSITIONS
    ),
    "Blenderbot": lambda: encoder_decoder(
        "FlaxBlenderbotForConditionalGeneration", "BlenderbotConfig", **BART, **POSITIONS
    ),
    "Whisper": whisper,
}

SIGHT: dict[str, Callable[[], Built]] = {
    "ViT": lambda: images("FlaxViTForImageClassification", "ViTConfig", **ENCODER, **SEEN),
    "BEiT": lambda: images("FlaxBeitForImageClassification", "BeitConfig", **ENCODER, **SEEN),
    "DINOv2": lambda: images("FlaxDinov2ForImageClassification", "Dinov2Config", **WIDE, **SEEN),
    "ResNet": lambda: resnet("FlaxResNetForImageClassification", "ResNetConfig"),
    "RegNet": lambda: resnet("FlaxRegNetForImageClassification", "RegNetConfig"),
    "CLIP": clip,
    "Wav2Vec 2": wav2vec2,
}


def cases() -> list[Case]:
    """Return the cases."""
    kinds = zip(
        ("language model", "encoder", "encoder-decoder", "images and sound"),
        (LANGUAGE, ENCODERS, BOTH, SIGHT),
        strict=True,
    )
    return [
        Case(name=name, kind=kind, package="transformers", build=build)
        for kind, models in kinds
        for name, build in models.items()
    ]
