"""Reads parts of the tensors in a folder's safetensors files, with the library of that name.

For NumPy the library returns bfloat16 in the dtype of ml_dtypes (versions 0.5 to 0.8 were tried).
It copies no more than the slice that is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # lets the library find bfloat16 by name, too
import numpy as np

from zeroxla.checkpoint.weights.safetensors_writer import DTYPES, INDEX, SINGLE
from zeroxla.models.folders import is_pointer, missing_weights, pointer_text
from zeroxla.program.extras import extra

FLOAT8 = "F8_E4M3"
"""The dtype of 8-bit floats in a file's header. For NumPy, the library does not return them."""

_READABLE = {header: dtype for dtype, header in DTYPES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
      file: the name of its file.
      shape: its shape.
      dtype: the dtype's name in the file's header, such as "BF16".
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorReader:
    """The tensors of a folder with a `model.safetensors`, or with an index and its files.

    Args:
      folder: the folder.
      alone: the name of the only file to read; None for those of a model.

    Attributes:
      tensors: all tensors, by name.

    Raises:
      ImportError: the library is not installed.
      ValueError: a file is missing or damaged, or the index contradicts the files.
    """

    def __init__(self, folder: Path, alone: str | None = None) -> None:
        self._library = _library()
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._first_bytes: dict[Path, dict[str, int]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        places = _places(folder) if alone is None else None
        for file in sorted({alone or SINGLE} if places is None else set(places.values())):
            opened = self._open(folder / file)
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                if places is not None and places.get(name) != file:
                    raise ValueError(
                        f"{folder / INDEX} has the tensor {name} in {places.get(name, 'no file')}, "
                        f"but it is in {file}; download the folder anew"
                    )
                part = opened.get_slice(name)
                stored = StoredTensor(
                    file=folder / file, shape=tuple(part.get_shape()), dtype=part.get_dtype()
                )
                self.tensors[name] = stored
                self._files[name] = opened
        if lost := sorted(set(places or ()) - set(self.tensors)):
            raise ValueError(
                f"{folder / INDEX} has the tensor {lost[0]} in {(places or {})[lost[0]]}, which "
                "does not hold it; download the folder anew"
            )

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of a tensor, in its own dtype.

        Args:
          index: a slice for each dim, within the shape, with step 1.

        Raises:
          ValueError: weights do not have the tensor's dtype.
        """
        check_dtype(name, self.tensors[name])
        return self.read_any(name, index)

    def read_any(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of a tensor that weights need not have the dtype of."""
        stored, opened = self.tensors[name], self._files[name]
        if stored.dtype == FLOAT8:
            return self._mapped(name)[index]
        if not stored.shape or 0 in stored.shape:  # the library takes no slices of these
            return opened.get_tensor(name)[index]
        shape = tuple(part.stop - part.start for part in index)
        if 0 in shape:
            return np.empty(shape, _READABLE.get(stored.dtype, np.float32))
        return opened.get_slice(name)[index]

    def _mapped(self, name: str) -> np.ndarray:
        """Return a tensor of 8-bit floats, mapped from its file, which the library has checked."""
        stored = self.tensors[name]
        if stored.file not in self._first_bytes:
            with open(stored.file, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
            self._first_bytes[stored.file] = {
                key: 8 + length + said["data_offsets"][0]
                for key, said in header.items()
                if key != "__metadata__"
            }
        dtype = np.dtype(ml_dtypes.float8_e4m3fn)
        first = self._first_bytes[stored.file][name]
        return np.memmap(stored.file, dtype, "r", first, stored.shape)

    def _open(self, path: Path) -> Any:
        try:
            return self._library.safe_open(path, framework="numpy")
        except OSError as error:
            # The library's own error repeats the path, and has the reason in its text alone.
            reason = error.strerror or str(error).partition(": ")[0]
            raise ValueError(
                f"{path} cannot be read: {reason}; give a folder with all files of the model: "
                "download it anew"
            ) from error
        except self._library.SafetensorError as error:
            if is_pointer(path):
                raise ValueError(pointer_text(path)) from error
            raise ValueError(
                f"{path} is damaged or no safetensors file ({error}); download it anew"
            ) from error


def check_dtype(name: str, stored: StoredTensor) -> None:
    """Check that a tensor has a dtype that can be read here.

    Raises:
      ValueError: it has another one.
    """
    if stored.dtype not in _READABLE:
        raise ValueError(
            f"the tensor {name} in {stored.file} is of the dtype {stored.dtype}; weights are read "
            f"from {', '.join(_READABLE)}: convert it, quantised ones with the program that made it"
        )


def _places(folder: Path) -> Mapping[str, str] | None:
    """Return the file of each tensor from the index; None for a single file without an index."""
    path = folder / INDEX
    if (folder / SINGLE).exists():
        return None
    try:
        places = json.loads(path.read_text())["weight_map"]
        if not places or not all(isinstance(v, str) and "/" not in v for v in places.values()):
            raise TypeError("weight_map gives no file for each tensor")
        return places
    except FileNotFoundError as error:
        raise ValueError(missing_weights(folder)) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if is_pointer(path):
            raise ValueError(pointer_text(path)) from error
        raise ValueError(f"{path} is damaged ({error}); download it anew") from error


def check_weights(folder: Path) -> None:
    """Check that a folder's weights are there, without reading them.

    Raises:
      ValueError: files are missing, or are pointers of Git LFS; with the remedy.
    """
    for file in sorted(set((_places(folder) or {"": SINGLE}).values())):
        if is_pointer(folder / file):
            raise ValueError(pointer_text(folder / file))
        if not (folder / file).exists():
            raise ValueError(
                f"{folder / file} is missing, and {INDEX} names it; download the folder anew"
            )


def _library() -> Any:
    with extra("hf", "reading weights needs"):
        import safetensors
    return safetensors
