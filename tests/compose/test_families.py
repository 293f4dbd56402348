"""Public families with generation, the axis `tensor`, and adapters on a base of 4 bits.

Quick is a mixture over the axis `tensor`. Quick tests elsewhere generate recorded tokens
(`cli/generate/test_generate.py`) and train adapters on 4 bits (`frontend/lora/test_frozen.py`)."""

import json

import jax
import numpy as np
import optax
import pytest
from tools.families import DECODERS, FAMILIES, leaves_in, recorded, tensors_of, write_folder
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import HybridEngine, from_pretrained, make_step
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = 8
WIDTHS = (
    *("hidden_size", "n_embd", "word_embed_proj_dim"),
    *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"),
)


MIXTURES = ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss", "deepseek")


def others(*quick):
    return [name for name in DECODERS if name not in quick]


def options_of(name):
    """A mixture's loss is then the cross-entropy alone."""
    return {"balance": 0.0} if name.startswith(MIXTURES) else {}


def batch_of(data):
    times = ROWS // len(data["tokens"])
    tokens, mask = (np.tile(data[key], (times, 1)) for key in ("tokens", "mask"))
    return {"tokens": tokens.astype(np.int32), "mask": mask[:, 1:]}


def trained(name, folder, **axes):
    """Return the model, its step and its state on a mesh, and a batch."""
    count = axes["devices_per_node"]
    data = recorded(name)
    hub = write_folder(folder / "hub", name, tensors_of(name))
    model = from_hugging_face(hub, **options_of(name))
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:count], **axes)
    step, batch = make_step(model, mesh, optax.sgd(0.1)), batch_of(data)
    step.abstract_state(batch)
    return model, step, from_pretrained(model, hub, step), batch, data


def leaf_at(tree, path):
    for key in path:
        tree = tree[key] if key in tree else tree[int(key)]
    return tree


@pytest.mark.parametrize("name", thinned([], slow=DECODERS))
def test_generation_from_the_training_state_is_the_recorded_one(tmp_path, name):
    _, step, state, _, data = trained(name, tmp_path, devices_per_node=2)
    prompts = [data["tokens"][0, :6].tolist()] * 2
    found = HybridEngine(step).generate(
        state, prompts, key=jax.random.key(0), max_new_tokens=12, temperature=0
    )
    np.testing.assert_array_equal(found.tokens[0], data["greedy"][0])


@pytest.mark.parametrize("name", thinned(["mixtral"], slow=others("mixtral")))
def test_split_over_an_axis_gradients_are_the_recorded_ones(tmp_path, name):
    model, step, state, batch, data = trained(name, tmp_path, devices_per_node=4, tensor=2)
    loss, gradients = step.grad(state, batch)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)
    grads = {key[5:]: data[key] for key in data.files if key.startswith("grad/")}
    for path, x in leaves_in(write_folder(tmp_path / "grads", name, grads), model).items():
        found = np.asarray(leaf_at(gradients, path))
        np.testing.assert_allclose(found, x, atol=1e-5, err_msg="/".join(path))


@pytest.mark.parametrize("name", thinned([], slow=DECODERS))
def test_adapters_learn_on_a_base_of_4_bits_and_generate(name):
    """Of a model four times as wide: a base's leaves of few elements stay as they are. It generates
    as the merged model does."""
    config = json.loads((FAMILIES / name / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {key: 4 * text[key] for key in WIDTHS if text.get(key)}
    rope = text.get("rope_parameters") or {}
    for key in ("long_factor", "short_factor"):
        if key in rope and not text.get("head_dim"):
            rope[key] = 4 * rope[key]
    plain = from_hugging_face(config, **options_of(name))
    model = zeroxla.lora(plain, targets=r"(self_attn|attn|mlp)/.*kernel", rank=4, frozen="int4")
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:2])
    step, batch = make_step(model, mesh, optax.adam(1e-2)), batch_of(recorded(name))
    state = step.init(jax.random.key(0), batch)
    assert any(x.dtype == np.uint8 for x in jax.tree.leaves(state.params))
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] - 0.05, losses
    merged = make_step(plain, mesh, optax.sgd(0.1))
    merged.abstract_state(batch)
    whole = merged.init_from(model.merge(zeroxla.full_params(state)), jax.random.key(0))
    found, want = (greedy_tokens(*pair) for pair in ((step, state), (merged, whole)))
    np.testing.assert_array_equal(found, want)


def greedy_tokens(step, state):
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    engine = HybridEngine(step)
    options = {"key": jax.random.key(0), "max_new_tokens": 8, "temperature": 0}
    return engine.generate(state, prompts, **options).tokens
