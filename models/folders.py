"""Says what a folder holds that is no Hugging Face model which can be read, and what to do."""

import json
import re
from pathlib import Path

POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of the small file that stands for a large one where Git LFS has not fetched it."""

_HUB = re.compile(r"(?:https?:/+(?:www\.)?huggingface\.co/|hf:/+)?([\w.-]+/[\w.-]+|[\w-]+)/?")
_TORCH = ("*.bin", "*.pt", "*.pth")
_ELSEWHERE = {"*.h5": "TensorFlow", "*.msgpack": "Flax", "*.onnx": "ONNX", "*.nemo": "NeMo"}


def is_pointer(file: Path) -> bool:
    """Return whether a file is a pointer of Git LFS and not what it stands for."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(POINTER)) == POINTER
    except OSError:
        return False


def pointer_text(file: Path) -> str:
    """Return what a pointer of Git LFS is, and the remedy."""
    return (
        f"{file} is a pointer of Git LFS and not the file itself; run `git lfs pull` in "
        f"{file.parent} (after `git lfs install`)"
    )


def missing_model(folder: Path) -> str:
    """Return why a folder without a config.json that can be read is no model, and the remedy."""
    if folder.is_file():
        if folder.suffix == ".gguf":
            return f"{folder} is a GGUF file; {_GGUF}"
        return f"{folder} is a file; give the folder of a model, with {_NEEDED}"
    if not folder.is_dir():
        return f"{folder} is no folder; {_download(folder)}"
    names = {file.name for file in folder.iterdir() if file.name != ".git"}
    if not names:
        return f"{folder} is empty; {_download(folder)}"
    if "adapter_config.json" in names:
        return adapter_text(folder)
    if snapshot := next(iter(sorted(folder.glob("snapshots/*/config.json"))), None):
        return f"{folder} is a cache of the hub; give {snapshot.parent}"
    if "model_index.json" in names:
        return f"{folder} holds a pipeline of Diffusers, and no language model; {_give()}"
    if any(folder.glob("*.gguf")):
        return f"{folder} holds GGUF files and no config.json; {_GGUF}"
    if "params.json" in names or "tokenizer.model.v3" in names:
        return (
            f"{folder} holds weights in the form of their makers (params.json), and no "
            "config.json; download the model in Hugging Face's format"
        )
    if inner := next(iter(sorted(folder.glob("*/config.json"))), None):
        return f"{folder} holds no config.json, and {inner.parent} does; give that folder"
    return f"{folder} holds no config.json; {_give()}"


def missing_weights(folder: Path) -> str:
    """Return what a folder without safetensors files holds in their place, and the remedy."""
    said = f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
    if any(any(folder.glob(pattern)) for pattern in _TORCH):
        return (
            f"{said}, but PyTorch's own files, which can run code and are not read; convert them: "
            f'python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
        )
    if any(folder.glob("*.gguf")):
        return f"{said}, but GGUF files; {_GGUF}"
    if (folder / "adapter_config.json").is_file():
        return adapter_text(folder)
    for pattern, name in _ELSEWHERE.items():
        if any(folder.glob(pattern)):
            return f"{said}, but weights for {name}; download the .safetensors files of the model"
    if (folder / "consolidated.safetensors").is_file():
        return (
            f"{said}, but consolidated.safetensors, whose tensors have the names of their makers; "
            "download the model's other .safetensors files"
        )
    return f"{said}; download the weights too, or give the folder that has them"


def missing_adapter(folder: Path) -> str:
    """Return why a folder is no adapter that can be read, and the remedy."""
    if not folder.is_dir():
        return f"{folder} is no folder; {_download(folder)}"
    if (folder / "adapter_model.bin").is_file():
        return (
            f"{folder} holds adapter_model.bin, PyTorch's own file, which can run code and is not "
            "read; save it with PEFT anew, which writes adapter_model.safetensors"
        )
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds no adapter_model.safetensors; download it too"
    what = "a whole model" if (folder / "config.json").is_file() else "no adapter"
    return (
        f"{folder} holds {what}; give the folder of a PEFT adapter, with adapter_config.json and "
        "adapter_model.safetensors"
    )


def adapter_text(folder: Path) -> str:
    """Return what the folder of an adapter is for, with the name of its base."""
    base = "its base"
    try:
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = found.get("base_model_name_or_path") or base
    except (OSError, ValueError, AttributeError):
        pass
    there = f" (hf download {base} --local-dir {Path(base).name})" if _is_name(base) else ""
    return (
        f"{folder} holds an adapter of PEFT and no model; give the folder of {base}{there}, and "
        f"this one with --adapter {folder} (zeroxla generate), --lora-init (zeroxla train) or "
        "adapter= (from_pretrained)"
    )


_NEEDED = "its config.json and its .safetensors files"
_GGUF = (
    "this form of llama.cpp, whose weights are rounded, is not read. Give the folder of the model "
    f"that it was made of, with {_NEEDED}"
)


def _give() -> str:
    return f"give the folder of a Hugging Face model, with {_NEEDED}"


def _is_name(name: str) -> bool:
    return not Path(name).exists() and _HUB.fullmatch(name) is not None


def _download(folder: Path) -> str:
    """Return the remedy for a folder that is missing: it may be meant as the name of a model."""
    found = _HUB.fullmatch(str(folder))
    if found is None:
        return f"{_give()} (nothing is downloaded)"
    name = found[1]
    return (
        f"nothing is downloaded. If it is a name on the hub: `hf download {name} --local-dir "
        f"{Path(name).name}` (pip install huggingface_hub), then give the folder "
        f"{Path(name).name}"
    )
