"""Flax models of other packages on the index, as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import (
    VOCABULARY,
    classification,
    floats,
    labels,
    next_token,
    to_waves,
    tokens,
)


def language_model(model: Any, logits: Callable[[Any, Any], Any]) -> Built:
    batch = {"tokens": tokens(11)}
    return Built(model=model, loss=next_token(logits), batch=batch, logits=logits, context=32)


def classifier(model: Any, call: Callable[..., Any], size: int = 16) -> Built:
    batch = {"image": floats(size, size, 3), "label": labels(5)}
    return Built(model=model, loss=classification(call), batch=batch)


def on_images(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
    return apply(batch["image"])


def on_images_in_training(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
    return apply(batch["image"], train=train)


def flaxmodels_resnet() -> Built:
    from flaxmodels import ResNet18

    options: dict[str, Any] = {"pretrained": None, "normalize": False}
    model = ResNet18(output="logits", num_classes=5, **options)
    return classifier(model, on_images_in_training, size=32)


def jax_resnet(style: str) -> Built:
    import jax_resnet

    blocks = {
        "ResNet-D": (jax_resnet.ResNetDStem, jax_resnet.ResNetDBottleneckBlock),
        "ResNeSt": (jax_resnet.ResNetDStem, jax_resnet.ResNeStBottleneckBlock),
    }
    stem, block = blocks[style]
    model = jax_resnet.ResNet(
        block, stem_cls=stem, stage_sizes=[1, 1], hidden_sizes=(8, 16), n_classes=5
    )
    return classifier(model, on_images, size=32)


def botnet() -> Built:
    from bottleneck_transformer_flax import BoTNet, BoTNetConfig

    config = BoTNetConfig(
        stage_sizes=[1, 1], num_classes=5, num_heads=2, head_dim=8, initial_filters=8
    )
    return classifier(BoTNet(config), on_images_in_training, size=32)


def tnt() -> Built:
    from transformer_in_transformer_flax import TNTConfig, TransformerInTransformer

    config = TNTConfig(
        num_classes=5, depth=2, image_size=32, patch_size=16, transformed_patch_size=4,
        inner_dim=8, inner_heads=2, inner_dim_head=4, outer_dim=32, outer_heads=2,
        outer_dim_head=16,
    )  # fmt: skip
    return classifier(TransformerInTransformer(config), on_images, size=32)


def local_attention() -> Built:
    from local_attention_flax import LocalAttention

    def call(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
        # It takes one sequence.
        return jnp.stack([apply(x) for x in batch["x"]])

    model = LocalAttention(dim=16, window_size=4, heads=2, dim_head=8)
    return Built(model=model, loss=to_waves(call), batch={"x": floats(8, 16)})


def gated_linear_rnn() -> Built:
    from flax_gated_linear_rnn import GatedLinearRNNLM

    model = GatedLinearRNNLM(
        n_layer=2, d_model=32, d_channel_mixing=48, eps=1e-5, channel_mixing_dropout=0.0,
        time_mixing_dropout=0.0, input_vocab_size=VOCABULARY, output_vocab_size=VOCABULARY,
        max_seq_length=32, embedding_dropout=0.0, use_word_embedding=True,
        positional_encoding_mode="none", use_head=True, d_h=32,
    )  # fmt: skip
    return language_model(model, lambda apply, tokens: apply(tokens, training=False)[1])


def ablang() -> Built:
    from ablang_jax import model

    model.N_BLOCK = 2  # Its sizes are constants; 2 of its 12 blocks will do.

    def call(apply: Any, batch: Mapping[str, Any], train: bool) -> Any:
        mask = jnp.ones(batch["tokens"].shape, jnp.float32)
        return apply(batch["tokens"], mask, return_attn=False)

    return Built(model=model.Ablanx(), loss=to_waves(call), batch={"tokens": tokens(7, 26)})


def attnax_language_model(**options: Any) -> Built:
    import attnax

    config = attnax.TransformerConfig(
        vocab_size=VOCABULARY, d_model=32, num_heads=2, num_layers=2, d_ff=48,
        dropout_rate=0.0, max_len=40, **options,
    )  # fmt: skip

    def logits(apply: Any, tokens: Any) -> Any:
        hidden = apply(tokens, deterministic=True)
        return apply.token_embed.embed.attend(hidden)

    return language_model(lambda rngs: attnax.TransformerDecoder(rngs, config), logits)


def attnax_vision() -> Built:
    import attnax

    config = attnax.VisionTransformerConfig(
        image_size=16, patch_size=8, d_model=32, num_heads=2, num_layers=2, d_ff=48,
        dropout_rate=0.0, num_classes=5,
    )  # fmt: skip
    return classifier(lambda rngs: attnax.VisionTransformer(rngs, config), on_images)


def dantinox(**options: Any) -> Built:
    from dantinox.core.config import ModelConfig
    from dantinox.core.model import Transformer

    config = ModelConfig(
        dim=32, n_heads=2, num_blocks=2, vocab_size=VOCABULARY, max_context=32, **options
    )

    def logits(apply: Any, tokens: Any) -> Any:
        return apply(tokens, deterministic=True).logits

    return language_model(lambda rngs: Transformer(config, rngs=rngs), logits)


def tunix(name: str, class_name: str, **options: Any) -> Built:
    """Return a language model of tunix: nnx modules with sharding annotations."""
    import importlib

    module = importlib.import_module(f"tunix.models.{name}.model")
    config = module.ModelConfig(
        num_layers=2, embed_dim=32, hidden_dim=48, num_heads=2, head_dim=16, num_kv_heads=1,
        **options,
    )  # fmt: skip

    def logits(apply: Any, tokens: Any) -> Any:
        length = tokens.shape[1]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (*tokens.shape, length))
        return apply(tokens, positions, None, mask)[0]

    def make(rngs: nnx.Rngs) -> Any:
        return getattr(module, class_name)(config, rngs=rngs)

    return language_model(make, logits)


LLAMA = {"vocab_size": VOCABULARY, "rope_theta": 10_000, "norm_eps": 1e-5}

LANGUAGE: dict[tuple[str, str], Callable[[], Built]] = {
    ("attnax", "decoder, rotary"): lambda: attnax_language_model(pos_emb_type="rope"),
    ("attnax", "decoder, grouped, SwiGLU"): lambda: attnax_language_model(
        num_kv_heads=1, ff_activation="swiglu", norm_type="rms"
    ),
    ("dantinox", "transformer"): dantinox,
    ("dantinox", "experts"): lambda: dantinox(ffn="moe", n_experts=2, top_k=1),
    ("google-tunix", "Llama 3"): lambda: tunix("llama3", "Llama3", **LLAMA),
    ("google-tunix", "Qwen 3"): lambda: tunix(
        "qwen3", "Qwen3", dtype=jnp.float32, param_dtype=jnp.float32, **LLAMA
    ),
    ("google-tunix", "Gemma 3"): lambda: tunix(
        "gemma3", "Gemma3", num_embed=VOCABULARY, sliding_window_size=8, param_dtype=jnp.float32
    ),
    ("flax-gated-linear-rnn", "gated RNN"): gated_linear_rnn,
}

OTHERS: dict[tuple[str, str], Callable[[], Built]] = {
    ("flaxmodels", "ResNet-18"): flaxmodels_resnet,
    ("jax-resnet", "ResNet-D"): lambda: jax_resnet("ResNet-D"),
    ("jax-resnet", "ResNeSt"): lambda: jax_resnet("ResNeSt"),
    ("bottleneck-transformer-flax", "BoTNet"): botnet,
    ("transformer-in-transformer-flax", "TNT"): tnt,
    ("attnax", "vision transformer"): attnax_vision,
    ("local-attention-flax", "local attention"): local_attention,
    ("ablanx", "AbLang 2"): ablang,
}

KIND_OF = {"local-attention-flax": "other", "ablanx": "encoder"}


def cases() -> list[Case]:
    """Return the cases."""
    found = [
        Case(name=f"{package} {name}", kind="language model", package=package, build=build)
        for (package, name), build in LANGUAGE.items()
    ]
    return found + [
        Case(
            name=f"{package} {name}",
            kind=KIND_OF.get(package, "images and sound"),
            package=package,
            build=build,
        )
        for (package, name), build in OTHERS.items()
    ]
