"""Models made from Hugging Face configs, with every spelling of rotary positions."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tools.hugging_face import recorded
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.models import GPT, Llama, from_hugging_face
from zeroxla.models.rope_scaling import RopeScaling
from zeroxla.models.rotary import rotary_tables

pytestmark = pytest.mark.usefixtures("quick_compilation")

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shape_of(model):
    """The model itself, or that of a function, without arrays."""
    return model if isinstance(model, GPT) else nnx.eval_shape(lambda: model(nnx.Rngs(0)))


@pytest.mark.parametrize("name", ["d_gpt2", "d_llama_mha", "d_llama_gqa_tied"])
def test_a_recorded_config_builds_the_model_and_comes_back(name):
    config, _, _ = recorded(name)
    model = shape_of(from_hugging_face(config, scan=False))
    assert not model.scan
    written = json.loads(json.dumps(model.hugging_face.config(model, dtype="float32")))
    known = {key: value for key, value in written.items() if key in config}
    known.pop("architectures"), known.pop("dtype")  # recorded as null
    known.pop("bos_token_id"), known.pop("eos_token_id")  # a tokenizer's
    assert known.pop("n_inner", None) in (None, 256)  # recorded as null, 4 x the width
    assert known == {key: config[key] for key in known}
    again = shape_of(from_hugging_face(written, scan=False))
    assert model.hugging_face.differences(written, again) == []
    assert model.hugging_face.differences(config, again) == []


def test_absent_keys_are_what_transformers_takes():
    gpt = from_hugging_face({"model_type": "gpt2"})
    assert gpt == GPT.small(hidden=4 * 768)
    assert from_hugging_face(GPT2, remat=True, dropout=0.1) == GPT(
        vocab=64, layers=2, width=32, heads=4, hidden=128, remat=True, dropout=0.1
    )
    llama = shape_of(from_hugging_face(LLAMA))
    config = llama.config
    assert (config.kv_heads, config.eps, config.tie) == (4, 1e-6, False)
    assert (config.rotary.theta, config.rotary.scaling) == (10000.0, None)


def test_a_folder_and_a_file_are_as_good_as_a_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    expected = from_hugging_face(GPT2)
    assert from_hugging_face(tmp_path) == expected
    assert from_hugging_face(str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize("preset", [Llama.tiny(), Llama.tiny(tie=True, rope_scaling=LLAMA3)])
def test_a_llama_is_its_config(preset):
    model = shape_of(preset)
    built = shape_of(from_hugging_face(model.hugging_face.config(model, dtype="bfloat16")))
    assert built.config == model.config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; there is a model for 'gpt2', 'llama', "),
        ({}, "model_type is None"),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu', .*'gelu_new'"),
        ({**GPT2, "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, .*1e-05"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "n_layer": None}, "n_layer=null"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu', .*'silu' or 'swish'"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias='yes'; it must be true or false"),
        ({**LLAMA, "head_dim": 7}, "head_width, must be a whole even number"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "type 'longrope'"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, r"needs \['factor'\], and lacks"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
        ({**LLAMA, "rope_scaling": {**LLAMA3, "beta": 1}}, r"knows nothing of \['beta'\]"),
        (
            {**LLAMA, "rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5},
            "two ways to say one thing",
        ),
        (
            {**LLAMA, "rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "two ways to say one thing",
        ),
    ],
)
def test_what_the_model_does_not_compute_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        from_hugging_face(config)


def test_overrides_do_not_contradict_the_config():
    with pytest.raises(ValueError, match=r"layers=3 \(the config says 2\) would not fit"):
        from_hugging_face(GPT2, layers=3)
    assert from_hugging_face(GPT2, layers=2).layers == 2


def test_a_missing_or_damaged_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"config.json cannot be read: No such file"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="does not hold JSON"):
        from_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        from_hugging_face(tmp_path)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    ],
)
def test_both_spellings_of_rope_say_the_same(spelling):
    model = shape_of(from_hugging_face({**LLAMA, **spelling}))
    assert (model.config.rotary.theta, model.config.rotary.scaling) == (5e5, RopeScaling.of(LLAMA3))


def test_linear_scaling_is_written_for_old_readers_too():
    model = shape_of(Llama.tiny(rope_scaling={"type": "linear", "factor": 4.0}))
    config = model.hugging_face.config(model, dtype="float32")
    assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    expected = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    assert config["rope_parameters"] == expected


def frequencies64(head_width, theta, scaling):
    """The published formulas, one frequency at a time, in float64."""
    found = []
    for i in range(head_width // 2):
        frequency = float(theta) ** (-2 * i / head_width)
        if scaling["rope_type"] == "linear":
            found.append(frequency / scaling["factor"])
            continue
        wavelength = 2 * np.pi / frequency
        original = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength > original / low:
            frequency /= scaling["factor"]
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
        found.append(frequency)
    return np.array(found)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, {**LLAMA3, "factor": 32.0}]
)
@pytest.mark.parametrize(("head_width", "theta"), [(128, 5e5), (16, 1e4)])
def test_rope_scaling_equals_the_formula(scaling, head_width, theta):
    expected = frequencies64(head_width, theta, scaling)
    unscaled = frequencies64(head_width, theta, {"rope_type": "linear", "factor": 1.0})
    found = RopeScaling.of(scaling).scale(
        jnp.asarray(unscaled, jnp.float32), theta, jnp.zeros((1, 1), int)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    positions = np.array([[0, 1, 17]])
    cos, sin = rotary_tables(jnp.asarray(positions), head_width, theta, RopeScaling.of(scaling))
    angle = positions[..., None] * expected
    np.testing.assert_allclose(cos[:, :, 0], np.cos(angle), atol=2e-5)
    np.testing.assert_allclose(sin[:, :, 0], np.sin(angle), atol=2e-5)
    kept = np.isclose(expected, unscaled, rtol=1e-12)
    assert kept.any() == (scaling["rope_type"] == "llama3")
    assert not kept.all()


def test_scaled_rope_is_what_a_llama_computes_with():
    tokens = np.arange(12, dtype=np.int32)[None]
    run = nnx.jit(lambda model, positions: model(tokens, positions_BL=positions))
    plain, scaled = (
        Llama.tiny(scan=False, layers=1, rope_scaling=scaling)(nnx.Rngs(0))
        for scaling in (None, {"rope_type": "linear", "factor": 2.0})
    )
    positions = np.arange(12)[None]
    np.testing.assert_allclose(run(scaled, 2 * positions), run(plain, positions), atol=1e-6)
    assert np.abs(run(scaled, positions) - run(plain, positions)).max() > 1e-5
