"""Folders of the hub as people have them: each that cannot be read is named with its remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tools.chat_folder import write_tokenizer
from tools.hugging_face import FIXTURES, hub_folder

from zeroxla.checkpoint.weights.adapter_import import lora_from_adapter
from zeroxla.cli.generate.source import TextSource
from zeroxla.cli.inputs import check_adapter, check_train
from zeroxla.cli.train.model import choose
from zeroxla.cli.train.options import ModelOptions, TextOptions, TrainOptions
from zeroxla.models import from_hugging_face

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 42\n"
ADAPTER = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B", "peft_type": "LORA"})


def folder_with(folder: Path, files: dict[str, str], *, without: tuple[str, ...] = ()) -> Path:
    """Make the folder of a Llama, change files in it, and take others out."""
    hub_folder(folder, "d_llama_mha")
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    for name in without:
        (folder / name).unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bare(folder: Path, files: dict[str, str]) -> Path:
    """Make a folder of these files alone."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    return folder


INDEX = json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}})
BARE = {
    "empty": ({}, "is empty; give the folder"),
    "adapter": (
        {"adapter_config.json": ADAPTER},
        "an adapter of PEFT and no model; give the folder",
    ),
    "its base": (
        {"adapter_config.json": ADAPTER},
        "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0",
    ),
    "the option": ({"adapter_config.json": ADAPTER}, "this one with --adapter "),
    "GGUF": (
        {"model-Q4_K_M.gguf": "GGUF"},
        "holds GGUF files and no config.json; this form of lla",
    ),
    "a cache": ({"snapshots/a1b2/config.json": "{}", "refs/main": "a1b2"}, "snapshots/a1b2"),
    "one above": ({"Qwen3-0.6B/config.json": "{}", ".git/config": ""}, "give that folder"),
    "Diffusers": ({"model_index.json": "{}"}, "a pipeline of Diffusers"),
    "Meta's": ({"params.json": "{}", "consolidated.00.pth": ""}, "the form of their makers"),
    "a README": (
        {"README.md": ""},
        "holds no config.json; give the folder of a Hugging Face model",
    ),
    "a pointer": ({"config.json": POINTER}, "config.json is a pointer of Git LFS and not the file"),
    "damaged": ({"config.json": "{"}, "damaged, it does not hold JSON"),
    "a new family": (
        {"config.json": '{"model_type": "mamba"}'},
        "zeroxla.make_step trains it as it",
    ),
}
CHANGED = {
    "a pointer": ({"model.safetensors": POINTER}, (), "run `git lfs pull` in"),
    "torch": ({"pytorch_model.bin": "PK"}, ("model.safetensors",), ".save_pretrained('"),
    "GGUF": ({"model.gguf": "GGUF"}, ("model.safetensors",), "but GGUF files"),
    "TensorFlow": ({"tf_model.h5": ""}, ("model.safetensors",), "but weights for TensorFlow"),
    "Mistral's": ({"consolidated.safetensors": ""}, ("model.safetensors",), "but consolidated.saf"),
    "an adapter": ({"adapter_config.json": ADAPTER}, ("model.safetensors",), "an adapter of PEFT"),
    "no weights": ({}, ("model.safetensors",), "download the weights too"),
    "a lost shard": (
        {"model.safetensors.index.json": INDEX},
        ("model.safetensors",),
        "model-00001-of-00002.safetensors is missing",
    ),
    "a pointer for an index": (
        {"model.safetensors.index.json": POINTER},
        ("model.safetensors",),
        "index.json is a pointer of Git LFS",
    ),
    "tokens": ({"tokenizer.json": POINTER}, (), "tokenizer.json is a pointer of Git LFS"),
    "a slow tokenizer": (
        {"tokenizer.model": ""},
        ("tokenizer.json",),
        "convert the tokenizer that is there",
    ),
}


def said_of(folder: Path, of: str) -> str:
    """Return the error of what a command does first with a folder."""
    options = TrainOptions(model=ModelOptions(init=folder))
    with pytest.raises(ValueError, match=r".") as caught:
        TextSource.of(folder) if of == "generate" else choose(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("of", ["generate", "train"])
@pytest.mark.parametrize("name", BARE)
def test_folders_without_a_model_are_named(tmp_path, name, of):
    files, said = BARE[name]
    assert said in said_of(bare(tmp_path / "folder", files), of)


@pytest.mark.parametrize("of", ["generate", "train"])
@pytest.mark.parametrize("name", CHANGED)
def test_models_that_lack_something_are_named_before_anything_is_traced(tmp_path, name, of):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    files, without, said = CHANGED[name]
    found = said_of(folder_with(tmp_path / "folder", files, without=without), of)
    assert said in found
    assert found.count("model-00001-of-00002.safetensors") < 2


@pytest.mark.parametrize("of", ["generate", "train"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "`hf download Qwen/Qwen3-0.6B --local-dir"),
        ("gpt2", "`hf download gpt2 --local-dir gpt2`"),
        ("/no/such/folder/at/all", "nothing is downloaded"),
    ],
)
def test_names_of_the_hub_are_no_folders(name, said, of):
    found = said_of(Path(name), of)
    assert "nothing is downloaded" in found
    assert said in found


def test_names_of_the_hub_are_told_before_anything_else():
    model, rows = ModelOptions(init=Path("Qwen/Qwen3-0.6B")), TextOptions(data=("org/chats",))
    with pytest.raises(ValueError, match=r"--init Qwen/Qwen3-0\.6B: .* `hf download Qwen/Qwen"):
        check_train(TrainOptions(model=model))
    with pytest.raises(ValueError, match="`hf download org/chats --repo-type dataset --local-dir"):
        check_train(TrainOptions(text=rows))
    with pytest.raises(
        ValueError, match=r"--lora-init org/a: .* `hf download org/a --local-dir a`"
    ):
        check_adapter("--lora-init", Path("org/a"))


def test_files_are_no_folders(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0\xff")
    assert "model.gguf is a GGUF file" in said_of(tmp_path / "model.gguf", "generate")
    with pytest.raises(ValueError, match=r"model\.gguf is a GGUF file; .* is not read"):
        from_hugging_face(tmp_path / "model.gguf")


def test_a_run_is_no_folder_of_the_hub(tmp_path):
    config = json.dumps({"command": "train", "options": {}})
    run = bare(tmp_path / "run", {"config.json": config, "metrics.jsonl": ""})
    assert f"(zeroxla export {run}), and give {run / 'export'}" in said_of(run, "train")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_model.bin": "PK"}, "holds adapter_model.bin, PyTorch's own file"),
        ({}, "holds no adapter_model.safetensors; download it too"),
        ({"adapter_model.safetensors": POINTER}, "run `git lfs pull`"),
        ({"adapter_config.json": POINTER}, "run `git lfs pull`"),
        (
            {"adapter_config.json": None, "config.json": "{}"},
            "holds a whole model; give the folder",
        ),
        (None, "is no folder"),
    ],
)
def test_adapters_that_lack_something_are_named(tmp_path, files, said):
    folder = tmp_path / "adapter"
    if files is not None:
        folder.mkdir()
        shutil.copy(FIXTURES / "peft_llama_lora.config.json", folder / "adapter_config.json")
        for name, text in files.items():
            (folder / name).write_text(text) if text is not None else (folder / name).unlink()
    model = from_hugging_face(json.loads((FIXTURES / "d_llama_mha.config.json").read_text()))
    with pytest.raises(ValueError, match=r".") as caught:
        lora_from_adapter(model, folder)
    assert said in str(caught.value)
