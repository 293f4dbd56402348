"""Weights that do not fit, or cannot be read or written: the error names them, with both values."""

import json
import re
import sys
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from tools.hugging_face import read_file, write_file
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.checkpoint.weights import export_files, pretrained, safetensors_writer
from zeroxla.checkpoint.weights.export import export_params, parse_size
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.checkpoint.weights.tensor_names import flat_leaves
from zeroxla.models import GPT, MLP, Llama

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = {"vocab": 64, "length": 32, "layers": 2, "width": 32, "heads": 4}
MODEL = GPT(**SHAPE, scan=False)
BATCH = {"tokens": np.zeros((8, 9), np.int32)}
LN = "transformer.h.1.ln_2.weight"


@pytest.fixture(scope="module")
def step():
    step = zeroxla.make_step(MODEL, zeroxla.make_mesh(nodes=2, devices_per_node=4), optax.sgd(0.1))
    step.abstract_state(BATCH)
    return step


@pytest.fixture(scope="module")
def state(step):
    return step.init(jax.random.key(0), BATCH)


@pytest.fixture(scope="module")
def whole(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    export_params(state, folder, model=MODEL)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A good export, to be spoilt."""
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, change):
    """Write the tensors anew, changed."""
    tensors = read_file(folder / "model.safetensors")
    change(tensors)
    write_file(folder / "model.safetensors", tensors)


def refused(step, folder, message, model=MODEL):
    with pytest.raises(ValueError, match=message):
        from_pretrained(model, folder, step)


def test_a_tensor_that_is_missing_unknown_or_misshapen_is_named(step, folder):
    change(folder, lambda t: t.pop(LN))
    refused(step, folder, rf"lacks {LN}, which the model needs")
    change(folder, lambda t: t.update({LN: np.ones(31, np.float32)}))
    refused(step, folder, rf"{LN} in .*model.safetensors has the shape \[31\].*\[32\]")
    change(folder, lambda t: t.update({LN: np.ones(32, np.float32)}))
    from_pretrained(MODEL, folder, step)
    change(folder, lambda t: t.update({"transformer.h.1.extra": np.ones(2, np.float32)}))
    refused(step, folder, "holds transformer.h.1.extra, for which the model has no place")


@pytest.mark.parametrize("name", [LN, "transformer.h.0.mlp.c_fc.weight"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_counted_and_their_tensor_named(step, folder, name, value):
    def spoil(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[0] = value

    change(folder, spoil)
    refused(
        step, folder, rf"the tensor {name} in .*safetensors holds 1 numbers that are NaN or inf"
    )


def test_a_dtype_that_holds_no_weights_is_named(step, folder):
    change(folder, lambda t: t.update({LN: np.ones(32, np.float64)}))
    refused(step, folder, f"{LN} in .* is of the dtype F64; weights are read from F32, BF16, F16")
    change(folder, lambda t: t.update({LN: np.ones(32, ml_dtypes.float8_e4m3fn)}))
    refused(step, folder, "dtype F8_E4M3")


def test_hub_files_without_the_prefix_and_with_masks_are_read(step, folder, state):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
        tensors["h.1.attn.masked_bias"] = np.float32(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    change(folder, rename)
    params = zeroxla.full_params(from_pretrained(MODEL, folder, step))
    jax.tree.map(np.testing.assert_array_equal, params, zeroxla.full_params(state))
    change(folder, lambda t: t.update({"lm_head.weight": t["wte.weight"] + 1}))
    refused(step, folder, "lm_head.weight that is not wte.weight.*tie=False")
    change(folder, lambda t: t.update({"transformer.ln_f.bias": t["ln_f.bias"]}))
    refused(step, folder, "holds both ln_f.bias and transformer.ln_f.bias; remove one")


def test_a_tied_head_is_compared_to_its_end():
    parts = list(pretrained._rows((2500, 3)))
    assert parts == [
        (slice(first, end), slice(0, 3)) for first, end in ((0, 1000), (1000, 2000), (2000, 2500))
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("n_head", 8, "n_head is 8, and the model has heads=4"),
        ("tie_word_embeddings", False, "tie_word_embeddings is False, .* tie=True"),
        ("activation_function", "relu", "activation_function is 'relu', and the model computes"),
        ("model_type", "llama", "model_type is 'llama', and the model is of the type 'gpt2'"),
        ("n_inner", 64, "n_inner is 64, and the model has hidden=128"),
    ],
)
def test_a_config_of_another_model_is_refused_by_key_and_both_values(
    step, folder, key, value, message
):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    refused(step, folder, message)


def test_missing_and_damaged_files_are_named(step, folder):
    file, config = folder / "model.safetensors", folder / "config.json"
    data, said = file.read_bytes(), config.read_bytes()
    file.write_bytes(data[:-4])
    refused(step, folder, r"model.safetensors is damaged or no safetensors file")
    file.write_bytes(b"")
    refused(step, folder, r"model.safetensors is damaged or no safetensors file")
    file.unlink()
    refused(step, folder, r"holds neither model.safetensors nor model.safetensors.index.json")
    config.write_text("{")
    refused(step, folder, r"config.json is damaged, it does not hold JSON")
    config.unlink()
    refused(step, folder, r"config.json cannot be read: No such file")
    config.write_bytes(said)


def test_an_index_that_does_not_fit_its_files_is_an_error(step, state, tmp_path):
    files = export_params(state, tmp_path, model=MODEL, max_shard_size="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {**index["weight_map"], LN: files[0].name}
    assert index["weight_map"][LN] != files[0].name
    path.write_text(json.dumps({"weight_map": moved}))
    refused(step, tmp_path, f"has the tensor {LN} in {files[0].name}")
    path.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": files[0].name}}))
    refused(step, tmp_path, f"has the tensor more in {files[0].name}, which does not hold it")
    for places in (["a"], {LN: "../other.safetensors"}):
        path.write_text(json.dumps({"weight_map": places}))
        refused(step, tmp_path, "index.json is damaged")
    path.write_text(json.dumps(index))
    files[1].unlink()
    refused(step, tmp_path, rf"{re.escape(files[1].name)} cannot be read: .*No such file")


def test_a_model_without_a_format_or_of_another_step_is_refused(step, folder):
    refused(step, folder, "a MLP has no Hugging Face format", MLP.tiny())
    refused(step, folder, "model is the class GPT", GPT)
    refused(step, folder, "the step is of another model than the GPT .* scan", GPT(**SHAPE))
    refused(step, folder, "the step is of another model than the Llama", Llama.tiny())
    blind = zeroxla.make_step(MODEL, step.mesh)
    refused(blind, folder, "the step has seen no batch")


def test_reading_without_the_library_says_what_to_install(step, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'zeroxla[hf]'")):
        from_pretrained(MODEL, folder, step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8'; choose 'float32', 'bfloat16', 'float16'"),
        ({"max_shard_size": "2XB"}, "max_shard_size='2XB'"),
        ({"max_shard_size": 0}, "max_shard_size=0"),
        ({"model": Llama.tiny()}, "the state is of another model than the Llama"),
        ({"model": GPT(**{**SHAPE, "layers": 3}, scan=False)}, "h_2.* is missing"),
    ],
)
def test_an_export_that_cannot_be_is_refused(state, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export_params(state, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"leaves a/b and a\.b would both be the tensor a\.b;"):
        flat_leaves({("a", "b"): (1,), ("a.b",): (1,)})


def test_sizes_count_in_thousands_or_in_1024():
    texts = ("7", "3KB", "2 MB", "1.5gb", "1TB", "3KiB", "2 MiB", "1.5gib", "1TiB")
    found = [7, 3000, 2 * 10**6, 15 * 10**8, 10**12, 3072, 2**21, 3 * 2**29, 2**40]
    assert [parse_size(text) for text in texts] == found


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot export a dict"):
        export_params({}, tmp_path)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        export_params(tmp_path, tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(state, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cannot write the export to .*out: Not a directory; corr"
    ):
        export_params(state, tmp_path / "file" / "out")
    with pytest.raises(ValueError, match=r"cannot write the export to .*file: File exists"):
        export_params(state, tmp_path / "file")

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Root may write anywhere.
    monkeypatch.setattr(safetensors_writer, "open", denied, raising=False)
    with pytest.raises(ValueError, match=r"cannot write the export to .*: Permission denied"):
        export_params(state, tmp_path)
    monkeypatch.setattr(
        export_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000)
    )
    with pytest.raises(ValueError, match=r"the export needs 1.. kB, and .* has 1 kB free"):
        export_params(state, tmp_path)


def test_a_number_beyond_float16_is_refused_with_its_tensor(step, state, tmp_path):
    params = dict(state.params)
    params["wpe"] = {"embedding": params["wpe"]["embedding"] + 1e5}
    large = step.init_from(params, jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"transformer.wpe.weight holds numbers up to 100000.*65504"
    ):
        export_params(large, tmp_path, model=MODEL, dtype="float16")
    assert list(tmp_path.iterdir()) == []
    export_params(large, tmp_path, model=MODEL, dtype="bfloat16")


def test_an_export_that_breaks_off_leaves_the_older_one(state, folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "model-00001-of-00009.safetensors.partial").write_bytes(b"of a killed process")

    def stop(done, total):
        if done > total / 2:
            raise OSError(28, "No space left on device")

    for size in ("5GB", "20KB"):
        with pytest.raises(ValueError, match=r"cannot write the export to .*: No space left"):
            export_params(
                state, folder, model=MODEL, dtype="bfloat16", max_shard_size=size, progress=stop
            )
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
