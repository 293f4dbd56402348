"""PEFT's adapters: recorded logits and gradients, bit-equal round trips, and what is refused."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
from tools.families import FAMILIES, leaves_in
from tools.hugging_face import FIXTURES, assert_same_tensors, hub_folder, read_file, write_file
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.weights.adapter_names import adapter_leaves, known_format
from zeroxla.models import GPT, MLP, Llama, from_hugging_face
from zeroxla.program.paths import paths_of

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)
BASES = {"gpt2": "d_gpt2", "llama": "d_llama_gqa_tied"}
PREFIX = "base_model.model."


def peft_folder(folder, name):
    """Make a folder like the one in which PEFT saves an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(FIXTURES / f"{name}.safetensors", folder / "adapter_model.safetensors")
    shutil.copyfile(FIXTURES / f"{name}.config.json", folder / "adapter_config.json")
    return folder


def opened(tmp_path, name, *, scan=True, frozen=None):
    """(model with a recorded adapter, its step, its state, a batch, the recorded numbers)."""
    hub = hub_folder(tmp_path / "hub", BASES[name.split("_")[1]])
    adapter = peft_folder(tmp_path / "adapter", name)
    model = zeroxla.lora_from_adapter(from_hugging_face(hub, scan=scan), adapter, frozen=frozen)
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(model, mesh, optax.adam(1e-3), config=config)
    data = np.load(FIXTURES / f"{name}.npz")
    batch = {"tokens": np.tile(data["tokens"], (4, 1))}
    step.abstract_state(batch)
    return model, step, zeroxla.from_pretrained(model, hub, step, adapter=adapter), batch, data


ROWS = [("peft_llama_rslora", True)]
SLOW = [
    ("peft_gpt2_dora", True),
    *(("peft_gpt2_lora", True), ("peft_gpt2_rslora", False), ("peft_gpt2_dora", False)),
    *(("peft_llama_lora", False), ("peft_llama_dora", True), ("peft_llama_rslora", False)),
]


@pytest.mark.parametrize(("name", "scan"), thinned(ROWS, slow=SLOW, rows=True))
def test_recorded_adapters_compute_what_peft_computes(tmp_path, name, scan):
    model, step, state, batch, data = opened(tmp_path, name, scan=scan)
    merged = model.merge(zeroxla.full_params(state))
    zeroxla.export_params(state, tmp_path / "merged", model=model)
    written = leaves_in(tmp_path / "merged", model.model)
    for path, x in paths_of(merged):
        np.testing.assert_allclose(written[path], x, atol=1e-6)
    apply = jax.jit(step.adapted.base.apply)
    np.testing.assert_allclose(apply(merged, {}, data["tokens"]), data["logits"], atol=1e-5)
    own = jax.jit(step.adapted.apply)(zeroxla.full_params(state), {}, data["tokens"])
    np.testing.assert_allclose(own, data["logits"], atol=1e-5)
    loss, grads = step.grad(state, batch)
    np.testing.assert_allclose(loss, data["loss"], atol=1e-5)

    # The gradients go the way that parameters go: their names and shapes are the file's.
    out = tmp_path / "gradients"
    carried = step.init_from({**zeroxla.full_params(state), "lora": grads["lora"]}, KEY)
    zeroxla.export_adapter(carried, out, model=model)
    for path, gradient in read_file(out / "adapter_model.safetensors").items():
        want = data[f"gradient/{path}"]
        np.testing.assert_allclose(gradient, want, atol=1e-5 * max(1, np.abs(want).max()))


@pytest.mark.parametrize(
    ("name", "scan"),
    thinned(
        [("peft_gpt2_dora", False)],
        slow=[("peft_llama_dora", True), ("peft_llama_lora", False)],
        rows=True,
    ),
)
def test_adapters_come_back_bit_by_bit(tmp_path, name, scan):
    model, step, state, _, _ = opened(tmp_path, name, scan=scan, frozen="int8")
    assert model.frozen == "int8"
    out = tmp_path / "out"
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, state)
    for source in (state, tmp_path / "run"):
        (file,) = zeroxla.export_adapter(source, out, model=model, base="some/base")
        tensors = read_file(file)
        assert_same_tensors(tensors, read_file(FIXTURES / f"{name}.safetensors"))
    written = json.loads((out / "adapter_config.json").read_text())
    recorded = json.loads((FIXTURES / f"{name}.config.json").read_text())
    assert written["base_model_name_or_path"] == "some/base"
    assert set(written.pop("target_modules")) == set(recorded["target_modules"])
    ours = {n: x for n, x in written.items() if n != "base_model_name_or_path"}
    assert {n: recorded[n] for n in ours} == ours
    end = "lora_magnitude_vector"  # which some versions of PEFT call a weight
    longer = {f"{n}.weight" if n.endswith(end) else n: x for n, x in tensors.items()}
    write_file(file, longer)
    again = zeroxla.init_from(
        step,
        {"base": state.params["base"], "lora": zeroxla.read_adapter(model, out)},
        KEY,
    )
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_an_export_beside_another_leaves_it_there(tmp_path):
    model, _, state, _, _ = opened(tmp_path, "peft_gpt2_lora")
    zeroxla.export_params(state, tmp_path / "both", model=model)
    zeroxla.export_adapter(state, tmp_path / "both", model=model, dtype="bfloat16")
    names = {file.name for file in (tmp_path / "both").iterdir()}
    whole = {"model.safetensors", "config.json"}
    assert names == {*whole, "adapter_model.safetensors", "adapter_config.json"}
    kinds = {x.dtype.name for x in read_file(tmp_path / "both/adapter_model.safetensors").values()}
    assert kinds == {"bfloat16"}


@pytest.mark.parametrize("targets", thinned(["h_1/mlp/c_fc/kernel"], slow=["attn/c_proj/kernel"]))
def test_short_names_are_written_where_they_suffice(tmp_path, targets):
    gpt = GPT.tiny(scan=False)
    model = zeroxla.lora(gpt, targets=targets, rank=2, alpha=1.5)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2))
    state = step.init(KEY, {"tokens": np.zeros((8, 9), np.int32)})
    zeroxla.export_adapter(state, tmp_path, model=model)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 1.5
    layers = (1,) if "h_1" in targets else (0, 1)
    module = "mlp.c_fc" if "h_1" in targets else "attn.c_proj"
    assert config["target_modules"] == [f"transformer.h.{i}.{module}" for i in layers]
    assert zeroxla.lora_from_adapter(gpt, tmp_path).alpha == 1.5
    if layers == (1,):
        with pytest.raises(ValueError, match="adapters for 1 of the 2 layers of h/mlp/c_fc/kernel"):
            zeroxla.lora_from_adapter(GPT.tiny(), tmp_path)


def test_what_is_no_adapter_is_refused(tmp_path):
    step = zeroxla.make_step(MLP.tiny(), zeroxla.make_mesh(nodes=2))
    batch = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    state = step.init(KEY, batch)
    with pytest.raises(ValueError, match="model=MLP: it has no adapters"):
        zeroxla.export_adapter(state, tmp_path, model=MLP.tiny())
    model = zeroxla.lora(MLP.tiny(), targets="kernel")
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2))
    state = step.init(KEY, batch)
    with pytest.raises(ValueError, match="a MLP has no Hugging Face format"):
        zeroxla.export_adapter(state, tmp_path, model=model)
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read: No such file"):
        zeroxla.lora_from_adapter(GPT.tiny(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged, or of another kind than LORA"):
        zeroxla.lora_from_adapter(GPT.tiny(), tmp_path)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"rank_pattern": {"c_proj": 4}}, "rank_pattern="),
        ({"alpha_pattern": {"c_proj": 4}}, "alpha_pattern="),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ],
)
def test_settings_that_are_not_computed_are_refused(tmp_path, changed, words):
    folder = peft_folder(tmp_path, "peft_gpt2_lora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ValueError, match=f"{words}.*merge it in PEFT"):
        zeroxla.lora_from_adapter(GPT.tiny(), folder)


def test_a_part_of_a_fused_weight_has_no_place_in_peft():
    config = json.loads((FAMILIES / "phi3" / "config.json").read_text())
    model = zeroxla.lora(from_hugging_face(config), targets="q_proj/kernel", rank=2)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    with pytest.raises(ValueError, match=r"q_proj/kernel .* is not the whole weight of a linear"):
        adapter_leaves(model.plan, known_format(model.model))


def test_adapters_of_other_models_are_refused(tmp_path):
    folder = peft_folder(tmp_path, "peft_llama_dora")
    with pytest.raises(ValueError, match="is no module of the GPT2LMHeadModel"):
        zeroxla.lora_from_adapter(GPT.tiny(), folder)
    # Another width, another kind, a tensor too many and one too few.
    model = zeroxla.lora_from_adapter(Llama.tiny(), folder)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=2))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    with pytest.raises(ValueError, match=r"shape \[2, .*needs"):
        zeroxla.read_adapter(model, folder)
    file = folder / "adapter_model.safetensors"
    tensors = read_file(file)
    write_file(file, {**tensors, "base_model.model.lm_head.weight": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=r"has base_model\.model\.lm_head\.weight, unlike"):
        zeroxla.read_adapter(model, folder)
    name = f"{PREFIX}model.layers.0.mlp.down_proj.lora_B.weight"
    write_file(file, {n: x for n, x in tensors.items() if n != name})
    with pytest.raises(ValueError, match=f"lacks {name}"):
        zeroxla.read_adapter(model, folder)
    plain = zeroxla.lora(Llama.tiny(), targets="down_proj", rank=2, alpha=6)
    with pytest.raises(ValueError, match="has use_dora=True and not False"):
        zeroxla.read_adapter(plain, folder)
    with pytest.raises(ValueError, match="for a model without adapters"):
        zeroxla.from_pretrained(Llama.tiny(), folder, step, adapter=folder)
