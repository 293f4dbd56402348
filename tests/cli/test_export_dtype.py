"""`zeroxla export` of runs that began from a folder: its dtype, and what merging changes."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from tools.hugging_face import read_file
from tools.quick import quick_compilation  # noqa: F401
from tools.text_models import wide_text_folder
from tools.train import train

import zeroxla
from zeroxla.cli.main import main
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A bfloat16 folder, and a run of adapters on it, whose base is stored in 4 bits."""
    folder = tmp_path_factory.mktemp("begun")
    whole = wide_text_folder(folder / "float32", "llama")
    model = from_hugging_face(whole)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1))
    step.abstract_state({"tokens": jax.ShapeDtypeStruct((8, 9), "int32")})
    state = zeroxla.from_pretrained(model, whole, step)
    base = folder / "base"
    shutil.copytree(whole, base)
    zeroxla.export_params(state, base, model=model, dtype="bfloat16")
    config = json.loads((base / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    text = folder / "text.txt"
    text.write_text(" ".join(f"t{i * i % 61}" for i in range(2000)))
    told = ["--init", base, "--run", folder / "run", "--data", text, "--length", 16, "--batch", 8]
    told += ["--eval-batches", 1, "--sample-bytes", 0, "--holdout", 0.1]
    assert train(*told, "--steps", 2, "--lora-rank", 2, "--lora-base", "int4") == 0
    return base, folder / "run"


def export(run, folder, *arguments):
    assert main(["export", str(run), "--output", str(folder), *map(str, arguments)]) == 0
    (file,) = folder.glob("*.safetensors")
    return read_file(file)


def differences(said):
    """Return the largest and the mean difference that were told."""
    found = re.search(r"by at most (\S+), and (\S+) on average", said)
    assert found is not None, said
    return tuple(map(float, found.groups()))


def is_dense(name):
    """Return whether a tensor is of a product with a kernel, which is stored in 4 bits."""
    return name.endswith("weight") and "norm" not in name and "embed" not in name


def change_of(adapter, name):
    """Return what PEFT's adapter adds to a tensor; 0 if it has none."""
    module = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{module}.lora_A.weight" not in adapter:
        return np.zeros(())
    a, b = (adapter[f"{module}.lora_{part}.weight"].astype(np.float64) for part in "AB")
    return 16 / 2 * b @ a


def test_an_export_has_the_dtype_of_the_folder(begun, tmp_path, capsys):
    _, run = begun
    tensors = export(run, tmp_path / "out")
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "in bfloat16, the dtype of the folder that the run began from, to" in (
        capsys.readouterr().out
    )
    adapter = export(run, tmp_path / "adapter", "--adapter")
    assert {str(x.dtype) for x in adapter.values()} == {"float32"}


def test_what_merging_onto_four_bits_changed_is_said(begun, tmp_path, capsys):
    base, run = begun
    merged = export(run, tmp_path / "out", "--dtype", "float32")
    said = capsys.readouterr().out
    adapter = export(run, tmp_path / "adapter", "--adapter")
    original, found = read_file(base / "model.safetensors"), []
    for name, x in merged.items():
        want = original[name].astype(np.float64)
        if is_dense(name):
            found.append(np.abs(x - (want + change_of(adapter, name))).ravel())
        else:
            np.testing.assert_array_equal(x, want)
    all_found = np.concatenate(found)
    assert f"its {all_found.size:,} weights differ from those of {base} with the adapters" in said
    largest, mean = differences(said)
    assert largest == pytest.approx(all_found.max(), rel=1e-2)
    assert mean == pytest.approx(all_found.mean(), rel=1e-2)
    assert mean > 1e-4


def test_without_the_folder_the_adapters_change_is_said(begun, tmp_path, capsys):
    base, run = begun
    hidden = base.rename(base.with_name("hidden"))
    try:
        merged = export(run, tmp_path / "out", "--dtype", "float32")
    finally:
        hidden.rename(base)
    said = capsys.readouterr().out
    assert "differ from those of the int4 base before merging (its original is not known)" in said
    adapter, changes = export(run, tmp_path / "adapter", "--adapter"), []
    for name, x in merged.items():
        if is_dense(name):
            changes.append(np.abs(np.broadcast_to(change_of(adapter, name), x.shape)).ravel())
    all_found = np.concatenate(changes)
    largest, mean = differences(said)
    assert largest == pytest.approx(all_found.max(), rel=1e-2)
    assert mean == pytest.approx(all_found.mean(), rel=1e-2)
