"""The folder that weights came from: what an export of them takes over from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zeroxla.checkpoint.weights.dequantize import KEY, Quantized
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.safetensors_writer import BESIDE, DTYPES
from zeroxla.checkpoint.weights.tensor_names import NamedLeaf, format_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FolderOrigin:
    """What an export takes over from a folder.

    Attributes:
      leaves: what is exported, its tensors under the names that they have in the folder.
      dtypes: the dtypes of tensors by name, without those that are quantized there.
      files: contents of files by name. If tensors are quantized there, config.json is without what
        says so.
      kept: tensors of the folder that the model has no part in, with their shapes.
      reader: reads them.
      quantized: how some of them are quantized; None if they are not.
    """

    leaves: list[NamedLeaf]
    dtypes: Mapping[str, str]
    files: Mapping[str, bytes]
    kept: Mapping[str, tuple[int, ...]]
    reader: TensorReader
    quantized: Quantized | None

    def read(self, name: str) -> np.ndarray:
        """Return one of the tensors that are kept."""
        stored = self.reader.tensors[name]
        whole = tuple(slice(0, n) for n in stored.shape)
        if self.quantized is not None and self.quantized.holds(stored):
            return self.quantized.read(self.reader, name, whole)
        return self.reader.read(name, whole).astype(np.float32)


def origin_of(
    folder: str | Path, leaves: Sequence[NamedLeaf], module: Any, config: Mapping[str, Any] | None
) -> FolderOrigin:
    """Return what an export takes over from a folder.

    Args:
      folder: a Hugging Face folder.
      leaves: what is exported.
      module: the abstract model; it must have a format.
      config: further keys of config.json, which may not be there: the file is copied.

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
    reader = TensorReader(folder)
    stored = {format.bare(name): name for name in reader.tensors}
    # Under other names the folder's own ones go back, so that its config fits the export.
    own = {
        name: stored.get(format.bare(name), name) if format.renamed else name
        for leaf in leaves
        for name in leaf.tensors
    }
    files = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    settings = json.loads(files["config.json"])
    quantized = Quantized.of(settings)
    if settings.pop(KEY, None) is not None:
        files["config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    kept = {
        name: reader.tensors[name].shape
        for bare, name in stored.items()
        if format.is_kept(bare)
        and not (quantized is not None and quantized.is_beside(name, reader.tensors))
    }
    places = {**{own[name]: stored.get(format.bare(name)) for name in own}, **dict(zip(kept, kept))}
    names = {value: key for key, value in DTYPES.items()}
    dtypes = {
        name: dtype
        for name, place in places.items()
        if place is not None and (dtype := names.get(reader.tensors[place].dtype)) is not None
    }
    return FolderOrigin(
        leaves=[dataclasses.replace(x, tensors=tuple(own[n] for n in x.tensors)) for x in leaves],
        dtypes=dtypes,
        files=files,
        kept=kept,
        reader=reader,
        quantized=quantized,
    )
