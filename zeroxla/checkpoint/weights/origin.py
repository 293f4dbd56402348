"""The folder that weights came from: what an export of them takes over from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.safetensors_writer import BESIDE, DTYPES
from zeroxla.checkpoint.weights.tensor_names import NamedLeaf, format_of

QUANTIZED = "quantization_config"


def origin_of(
    folder: str | Path, leaves: Sequence[NamedLeaf], module: Any, config: Mapping[str, Any] | None
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return the dtypes of tensors in a folder, and the files beside them that an export copies.

    Args:
      folder: a Hugging Face folder.
      leaves: what is exported.
      module: the abstract model; it must have a format.
      config: further keys of config.json, which may not be there: the file is copied.

    Returns:
      The dtypes by the names of tensors, without those that are quantized there, and the contents
      of files by name. If some are quantized, config.json is without what says so.

    Raises:
      ValueError: the model has no format, there are further keys, or the folder cannot be read.
    """
    folder = Path(folder).expanduser()
    format = format_of(module)
    if format is None or config:
        raise ValueError(
            f"like={str(folder)!r}: "
            + (
                f"its config.json is copied as it is, and config={dict(config)} would change it; "
                "leave one of them out"
                if config
                else "only the weights of a model with a Hugging Face format can be like a folder; "
                "give model="
            )
        )
    names = {value: key for key, value in DTYPES.items()}
    stored = {
        name.removeprefix(format.prefix): names.get(tensor.dtype)
        for name, tensor in TensorReader(folder).tensors.items()
    }
    found = {
        name: dtype
        for leaf in leaves
        for name in leaf.tensors
        if (dtype := stored.get(name.removeprefix(format.prefix))) is not None
    }
    files = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    settings = json.loads(files["config.json"])
    if settings.pop(QUANTIZED, None) is not None:
        files["config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    return found, files
