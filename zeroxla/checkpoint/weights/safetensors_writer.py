"""Writes safetensors files from tensors in any order; a half-written export is never taken for
whole.

First a plan gives every tensor its place. Files have temporary names until all are on disk. Then
the index, or the single file, of an older export is removed, the new files are renamed, and the new
index, or single file, comes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Dtypes of weights, with their names in a file's header."""

BESIDE = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model"),
)
"""The files that belong to weights: the model's config and its tokenizer."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PARTIAL = ".partial"
_BLOCK_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor's place.

    Attributes:
      file: the name of its file.
      offset: the place of its first byte there.
      dtype: its dtype, by NumPy's name.
    """

    shape: tuple[int, ...]
    file: str
    offset: int
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """The places of all tensors in files.

    Attributes:
      tensors: places by name, in the order of the files.
      headers: the bytes of each file before its first tensor.
      sizes: the size of each file in bytes.
      single: the name of the file if there is one alone.
    """

    tensors: Mapping[str, Tensor]
    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    single: str = SINGLE

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def num_elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors, headers aside."""
        return sum(self.bytes_of(name) for name in self.tensors)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor."""
        tensor = self.tensors[name]
        return math.prod(tensor.shape) * jnp.dtype(tensor.dtype).itemsize

    @property
    def index(self) -> str | None:
        """The text of the index; None for a single file, which needs none."""
        if self.single in self.sizes:
            return None
        places = {name: tensor.file for name, tensor in self.tensors.items()}
        metadata = {"total_parameters": self.num_elements, "total_size": self.tensor_bytes}
        return json.dumps({"metadata": metadata, "weight_map": places}, indent=2) + "\n"


def make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str,
    max_shard_bytes: int | None = None,
    dtypes: Mapping[str, str] | None = None,
    single: str = SINGLE,
) -> FilePlan:
    """Give every tensor its place.

    Args:
      shapes: the tensors' shapes, by name.
      dtype: one of `DTYPES`.
      dtypes: the dtypes of tensors that have another one, by name.
      max_shard_bytes: largest size of the tensors in a file. A larger tensor is alone in its file.
        None puts all tensors into one file.
      single: the name of the file if there is one alone.

    >>> make_plan({"a": (2,), "b": (3,)}, dtype="float32", max_shard_bytes=12).tensors["b"].file
    'model-00002-of-00002.safetensors'
    """
    own = {name: (dtypes or {}).get(name, dtype) for name in shapes}
    num_bytes = {n: math.prod(shapes[n]) * jnp.dtype(own[n]).itemsize for n in shapes}
    groups: list[list[str]] = [[]]
    held = 0
    for name in sorted(shapes, key=_natural_order):
        size = num_bytes[name]
        if groups[-1] and max_shard_bytes is not None and held + size > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    tensors, headers, sizes = {}, {}, {}
    for i, names in enumerate(groups, start=1):
        file = single if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        ends = np.cumsum([0, *(num_bytes[n] for n in names)]).tolist()
        said = {
            name: {"dtype": DTYPES[own[name]], "shape": shapes[name], "data_offsets": [first, last]}
            for name, first, last in zip(names, ends, ends[1:])
        }
        # Transformers requires this metadata; it says "pt" for files of any program.
        text = json.dumps({"__metadata__": {"format": "pt"}, **said}).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = struct.pack("<Q", len(text)) + text
        sizes[file] = len(headers[file]) + ends[-1]
        for name, first in zip(names, ends):
            offset = len(headers[file]) + first
            tensors[name] = Tensor(
                shape=tuple(shapes[name]), file=file, offset=offset, dtype=own[name]
            )
    return FilePlan(tensors=tensors, headers=headers, sizes=sizes, single=single)


class Writer:
    """Writes a plan's files; see `writing`."""

    def __init__(self, plan: FilePlan, files: Mapping[str, BinaryIO]) -> None:
        self._plan, self._files = plan, files
        self._left = set(plan.tensors)

    def write(self, name: str, values: np.ndarray) -> None:
        """Write a tensor to its place.

        Args:
          values: float32 in the tensor's shape, with any strides.

        Raises:
          ValueError: a number is too large for the dtype.

        Cost: memory of 32 MiB beside the values, or of one row if that is more.
        """
        tensor = self._plan.tensors[name]
        assert values.shape == tensor.shape, (name, values.shape, tensor.shape)
        file = self._files[tensor.file]
        file.seek(tensor.offset)
        for block in _blocks(values):
            file.write(_cast(block, tensor.dtype, name).view(np.uint8))
        self._left.discard(name)

    def is_complete(self) -> bool:
        return not self._left


@contextlib.contextmanager
def writing(plan: FilePlan, folder: Path, others: Mapping[str, bytes]) -> Iterator[Writer]:
    """Write an export. When the context ends well, its files are there and an older export's files
    are gone. If a file cannot be written, the folder is as it was.

    Args:
      plan: the places of the tensors.
      folder: an existing folder.
      others: contents of files that belong to the export, by name.

    Raises:
      OSError: a file cannot be written.
    """
    entry = plan.single if plan.index is None else INDEX
    texts = {**others, **({} if plan.index is None else {INDEX: plan.index.encode()})}
    older = [*_names_of_exports(folder), *plan.sizes, *texts]
    _remove(folder / f"{name}{_PARTIAL}" for name in older)
    try:
        with contextlib.ExitStack() as opened:
            files: dict[str, BinaryIO] = {}
            for name, header in plan.headers.items():
                file = opened.enter_context(open(folder / (name + _PARTIAL), "wb"))
                files[name] = file
                file.write(header)
                file.truncate(plan.sizes[name])
            writer = Writer(plan, files)
            yield writer
            assert writer.is_complete(), "a tensor was not written"
            for file in files.values():
                file.flush()
                os.fsync(file.fileno())
        for name, text in texts.items():
            with open(folder / (name + _PARTIAL), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            _remove(folder / (name + _PARTIAL) for name in (*plan.sizes, *texts))
        raise
    names = [*plan.sizes, *texts]
    names.remove(entry)
    is_model = plan.single == SINGLE
    _remove(folder / name for name in ((INDEX, SINGLE) if is_model else (entry,)))
    for name in (*names, entry):
        os.replace(folder / (name + _PARTIAL), folder / name)
    shards = [f for f in folder.iterdir() if _SHARD.fullmatch(f.name)] if is_model else []
    _remove(f for f in shards if f.name not in plan.sizes)
    _sync_folder(folder)


def _names_of_exports(folder: Path) -> list[str]:
    """Return the names of unfinished files that a broken-off export left."""
    found = (f.name.removesuffix(_PARTIAL) for f in folder.glob(f"*{_PARTIAL}"))
    return [n for n in found if n in (SINGLE, INDEX, *BESIDE) or _SHARD.fullmatch(n)]


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _natural_order(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the values some rows at a time."""
    if values.ndim == 0 or not values.size:
        yield values
        return
    rows = max(1, _BLOCK_BYTES * len(values) // values.nbytes)
    for first in range(0, len(values), rows):
        yield values[first : first + rows]


def _cast(values: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Return the values flattened, rounded to nearest, ties to even."""
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(values, jnp.dtype(dtype)).reshape(-1)
    if dtype != "float32" and (np.isinf(cast) & np.isfinite(values.reshape(-1))).any():
        largest = np.abs(values[np.isfinite(values)]).max()
        raise ValueError(
            f"{name} holds numbers up to {largest:.6g}, which {dtype} cannot; it ends at "
            f"{float(jnp.finfo(dtype).max):.6g}: export bfloat16 or float32"
        )
    return cast
