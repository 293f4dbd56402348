"""How config.json is read: the cases that the recorded checkpoints do not have."""

from __future__ import annotations

import json

import flax.nnx as nnx
import jax.numpy as jnp
import pytest
from tools.chatglm import CONFIG as CHATGLM
from tools.families import FAMILIES as FOLDERS

from zeroxla.models import from_hugging_face
from zeroxla.models.families import FAMILIES


def decoder(name, *, without=(), **changes):
    """The decoder of a recorded config with other values, and without some keys."""
    config = CHATGLM
    if name != "chatglm":
        config = json.loads((FOLDERS / name / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    return FAMILIES[kept["model_type"]].decoder_config({**kept, **changes})


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
NO_KINDS = ("layer_types", "sliding_window", "max_window_layers", "use_sliding_window")


@pytest.mark.parametrize(
    ("name", "values", "window", "windowed"),
    [
        # Transformers' own defaults: the first Mistral has a window, Qwen has none unless asked.
        ("mistral", {}, 4096, (True, True)),
        ("mistral", {"sliding_window": None}, None, ()),
        ("mixtral", {}, None, ()),
        ("mixtral", {"sliding_window": 5}, 5, (True, True)),
        ("phi3", {}, None, ()),
        ("qwen2", {"sliding_window": 5}, None, ()),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False}, None, ()),
        ("qwen2", {"use_sliding_window": True}, 4096, (False, False)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, 4096, (False, True)),
        (
            "qwen3",
            {
                **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            5,
            (True, False),
        ),
        # Its layers all have the window.
        ("qwen3_moe", {"sliding_window": 5}, None, ()),
        (
            "qwen3_moe",
            {
                **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
                "layer_types": ["full_attention", "full_attention"],
            },
            5,
            (True, True),
        ),
        ("gemma2", {"sliding_window": 5}, 5, (True, False, True, False)),
        ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 3}, 5, (1, 1, 0, 1)),
        ("gemma3_text", {"_sliding_window_pattern": 2}, 4096, (1, 0, 1, 0)),
        ("granite", {"sliding_window": 5}, None, ()),
        ("granitemoe", {"sliding_window": 5}, None, ()),
        ("olmo2", {"sliding_window": 5}, None, ()),
        ("olmo3", {}, 4096, (1, 1, 1, 0)),
        ("cohere", {"sliding_window": 5}, None, ()),
        ("cohere2", {}, 4096, (1, 1, 1, 0)),
        ("cohere2", {"sliding_window": 5, "sliding_window_pattern": 2}, 5, (1, 0, 1, 0)),
        ("gpt_oss", {}, 128, (True, False)),
        ("gpt_oss", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}, 5, (0, 0)),
        # Of SmolLM3 only layers without positions may have a window.
        ("smollm3", {"sliding_window": 5}, None, ()),
        ("smollm3", {"sliding_window": 5, "use_sliding_window": True}, 5, (0, 1, 0, 0)),
    ],
)
def test_which_layers_have_a_window(name, values, window, windowed):
    without = (*NO_KINDS, "_sliding_window_pattern")
    found = decoder(name, without=without, **values)
    assert (found.window, found.windowed) == (window, windowed)


SHAPE = {"hidden_size": 512, "num_attention_heads": 16}
ABSENT = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_width", "eps", "tie"),
    [
        ("mistral", 8, 32, 1e-6, False),
        ("mixtral", 8, 32, 1e-5, False),
        ("qwen3", 32, 128, 1e-6, False),
        ("qwen3_moe", 4, 32, 1e-6, False),
        ("phi3", 16, 32, 1e-5, False),
        ("glm", 2, 128, 1.5625e-7, False),
        ("gemma", 16, 256, 1e-6, True),
        ("gemma2", 4, 256, 1e-6, True),
        ("gemma3_text", 4, 256, 1e-6, True),
        ("granite", 16, 32, 1e-6, False),
        ("granitemoe", 16, 32, 1e-6, False),
        ("smollm3", 4, 32, 1e-6, True),
        ("olmo2", 16, 32, 1e-5, False),
        ("olmo3", 16, 32, 1e-5, False),
        ("gpt_oss", 8, 64, 1e-5, False),
    ],
)
def test_keys_that_a_config_leaves_out_mean_what_transformers_takes(
    name, kv_heads, head_width, eps, tie
):
    shape = SHAPE if name != "qwen3" else {**SHAPE, "num_attention_heads": 32}
    changes = {"partial_rotary_factor": 0.5} if name == "glm" else {}
    found = decoder(name, without=(*ABSENT, "rope_parameters"), **shape, **changes)
    assert (found.kv_heads, found.head_width, found.eps, found.tie) == (
        kv_heads,
        head_width,
        eps,
        tie,
    )


def test_keys_of_newer_families_that_a_config_leaves_out():
    rope = ("rope_parameters",)
    scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
    found = decoder("granite", without=(*scales, "logits_scaling"))
    assert (found.embed_scale, found.residual_scale, found.score_scale) == (1, 1, 1)
    assert found.logit_scale == 1
    assert decoder("granite", logits_scaling=8).logit_scale == 1 / 8
    assert decoder("granite", attention_bias=True, mlp_bias=True).mlp_bias

    cohere = decoder("cohere", without=(*rope, "logit_scale", "use_qk_norm", "layer_norm_eps"))
    assert (cohere.logit_scale, cohere.qk_norm, cohere.eps) == (0.0625, None, 1e-5)
    assert (cohere.rotary.theta, decoder("cohere2", without=rope).rotary.theta) == (5e5, 1e4)
    assert decoder("cohere", without=("tie_word_embeddings",)).tie

    smol = decoder("smollm3", without=(*rope, "no_rope_layers", "layer_types"))
    assert (smol.rotary.theta, smol.rotated) == (2e6, (True, True, True, False))
    smol = decoder("smollm3", without=("no_rope_layers",), no_rope_layer_interval=2)
    assert smol.rotated == (True, False, True, False)
    assert decoder("smollm3", no_rope_layers=[1] * 4).rotated == ()

    olmo = decoder("olmo3", without=rope, rope_theta=1e5, rope_scaling=YARN)
    assert (olmo.rotary.scaling.factor, olmo.local_rotary.scaling) == (8, None)
    assert olmo.local_rotary.theta == 1e5
    assert decoder("olmo3", without=rope).rotary.theta == 5e5

    oss = decoder("gpt_oss", without=(*rope, "attention_bias", "swiglu_limit", "num_local_experts"))
    assert (oss.rotary.theta, oss.rotary.scaling.factor) == (150000, 32)
    assert (oss.qkv_bias, oss.out_bias, oss.experts.clamp, oss.experts.count) == (1, 1, 7, 128)
    # Transformers adds no balancing loss unless it is asked for the router's logits.
    assert decoder("gpt_oss", router_aux_loss_coef=0.9).experts.balance == 0
    asked = decoder("gpt_oss", router_aux_loss_coef=0.9, output_router_logits=True)
    assert asked.experts.balance == 0.9


def test_keys_of_deepseek_that_a_config_leaves_out():
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = decoder("deepseek_v3", without=names)
    latent = found.latent
    assert (latent.query_rank, latent.rank, latent.rotated, latent.value_width) == (
        *(1536, 512, 64, 128),
    )
    assert (found.head_width, found.rotary.width, found.kv_heads) == (192, 64, 4)
    experts = decoder(
        "deepseek_v3",
        without=("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
        n_routed_experts=64,
    ).experts
    assert (experts.groups, experts.top_groups, experts.scale) == (8, 4, 2.5)
    assert experts.is_normalized
    assert experts.balance == 0
    first = decoder("deepseek_v3", without=("first_k_dense_replace",), num_hidden_layers=5)
    assert first.experts.dense_layers == (0, 1, 2)
    with pytest.raises(ValueError, match="topk_method is 'greedy', and the model computes 'noaux"):
        decoder("deepseek_v3", topk_method="greedy")
    with pytest.raises(ValueError, match="8 experts in groups=3"):
        decoder("deepseek_v3", n_group=3)


def test_the_text_of_gemma_3_in_a_folder_with_images():
    """As the first folders of Gemma 3 4B have it: what is absent is as in the smallest model."""
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            **{"model_type": "gemma3_text", "sliding_window": 1024},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"hidden_size": 1152},
    }
    found = FAMILIES["gemma3"].decoder_config(config)
    assert (found.vocab, found.layers, found.width, found.heads) == (262208, 34, 2560, 8)
    assert (found.kv_heads, found.head_width, found.hidden, found.tie) == (4, 256, 10240, True)
    assert (found.rotary.scaling.factor, found.local_rotary.scaling) == (8, None)
    assert found.windowed[:6] == (True,) * 5 + (False,)
    written = json.loads(found.source)
    assert written["architectures"] == ["Gemma3ForCausalLM"]
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", [1, 106])
    with pytest.raises(ValueError, match="text_config=None; it must be that of the text"):
        FAMILIES["gemma3"].decoder_config({"model_type": "gemma3"})


def test_caps_and_biases_that_a_config_leaves_out():
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found = decoder("gemma2", without=caps)
    assert (found.score_cap, found.logit_cap) == (50, 30)
    found = decoder("gemma2", **dict.fromkeys(caps))
    assert (found.score_cap, found.logit_cap) == (None, None)
    found = decoder("gemma3_text", without=caps)
    assert (found.score_cap, found.logit_cap) == (None, None)
    assert decoder("glm", without=("attention_bias",)).qkv_bias


def test_positions_in_older_spellings():
    old = ("rope_parameters",)
    neox = decoder("gpt_neox", without=old, rotary_emb_base=5000, rotary_pct=0.5).rotary
    assert (neox.theta, neox.width) == (5000, 4)
    assert decoder("gpt_neox", without=old).rotary.width == 2  # a quarter of a head
    gptj = decoder("gptj", rotary_dim=None)
    assert gptj.rotary.width == gptj.head_width
    assert decoder("mixtral", without=(*old, "rope_theta")).rotary.theta == 1e6
    gemma = decoder(
        "gemma3_text",
        without=old,
        rope_theta=5e5,
        rope_local_base_freq=2e3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert (gemma.rotary.theta, gemma.rotary.scaling.factor) == (5e5, 8.0)
    assert (gemma.local_rotary.theta, gemma.local_rotary.scaling) == (2e3, None)
    phi = decoder(
        "phi3",
        without=old,
        original_max_position_embeddings=16,  # a quarter of its 64
        rope_scaling={"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ).rotary.scaling
    assert (phi.rope_type, phi.factor) == ("longrope", 4)
    assert phi.amplitude == pytest.approx(1.5**0.5)  # 1 + log 4 / log 16


def test_a_chatglm_of_other_versions():
    glm = decoder("chatglm", rope_ratio=50)
    assert (glm.rotary.theta, glm.kv_heads, glm.qkv_bias) == (5e5, 2, True)
    assert decoder("chatglm", multi_query_attention=False).kv_heads == 4
    assert not decoder("chatglm", without=("add_qkv_bias",)).qkv_bias
    assert not decoder("chatglm", add_qkv_bias=False).qkv_bias


@pytest.mark.parametrize(
    ("values", "dense"),
    [
        ({}, ()),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"mlp_only_layers": [1]}, (1,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3)),
    ],
)
def test_which_layers_have_experts(values, dense):
    experts = decoder("qwen3_moe", num_hidden_layers=4, **values).experts
    assert experts.dense_layers == dense


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_balance_of_experts_is_the_configs(name):
    assert decoder(name, router_aux_loss_coef=0.25).experts.balance == 0.25
    assert decoder(name, without=("router_aux_loss_coef",)).experts.balance == 0.001


def test_biases_and_functions_that_a_config_names():
    assert decoder("glm").qkv_bias
    assert not decoder("glm", attention_bias=False).qkv_bias
    neox = decoder("gpt_neox", attention_bias=False)
    assert (neox.qkv_bias, neox.out_bias, neox.mlp_bias) == (False, False, True)
    assert decoder("gpt_neox", hidden_act="gelu_fast").activation == "gelu_tanh"
    # Files of the first Gemma say "gelu" and mean the function with tanh.
    assert decoder("gemma", hidden_act="gelu", hidden_activation=None).activation == "gelu_tanh"
    assert decoder("gemma2", hidden_activation="gelu").activation == "gelu"
    with pytest.raises(ValueError, match="hidden_act='mish', and the model computes 'silu'"):
        decoder("mistral", hidden_act="mish")


def test_a_file_that_computes_something_else_is_refused():
    with pytest.raises(ValueError, match="word_embed_proj_dim=16 and hidden_size="):
        decoder("opt", word_embed_proj_dim=16)
    with pytest.raises(ValueError, match="sliding_window=null, and layers with a window"):
        decoder("cohere2", sliding_window=None)
    for name in ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss", "deepseek_v3"):
        with pytest.raises(ValueError, match="hidden_act is 'gelu', and the model computes 'silu'"):
            decoder(name, hidden_act="gelu")
    with pytest.raises(ValueError, match="neither num_experts nor num_local_experts"):
        decoder("qwen3_moe", without=("num_experts", "num_local_experts"))


def test_a_row_longer_than_the_learned_positions_is_refused():
    build = from_hugging_face(json.loads((FOLDERS / "opt" / "config.json").read_text()))
    with pytest.raises(ValueError, match="sequence of 65 tokens, but the model has 64 positions"):
        nnx.eval_shape(lambda: build(nnx.Rngs(0))(jnp.zeros((1, 65), jnp.int32)))


def test_another_window_is_another_model_and_a_longer_context_is_not():
    config = json.loads((FOLDERS / "mistral" / "config.json").read_text())
    model = nnx.eval_shape(lambda: from_hugging_face(config)(nnx.Rngs(0)))
    format = FAMILIES["mistral"]
    assert format.differences({**config, "max_position_embeddings": 9}, model) == []
    found = format.differences({**config, "sliding_window": 9, "hidden_act": "gelu"}, model)
    assert set(found) == {
        "window is 9, and the model has 5",
        "activation is 'gelu', and the model has 'silu'",
    }


def test_the_config_that_is_written_has_the_dtype_of_the_tensors():
    config = json.loads((FOLDERS / "mistral" / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        kept = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}
        model = nnx.eval_shape(lambda c={**kept, key: "float32"}: from_hugging_face(c)(nnx.Rngs(0)))
        written = FAMILIES["mistral"].config(model, dtype="bfloat16")
        assert written == {**kept, key: "bfloat16"}
