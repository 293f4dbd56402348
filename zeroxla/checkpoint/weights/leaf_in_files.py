"""`LeafInFiles`: a leaf that is read from safetensors files, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.tensor_names import NamedLeaf
from zeroxla.program.paths import Path


def leaves_in_files(
    leaves: Iterable[NamedLeaf], reader: TensorReader, names: Mapping[str, str]
) -> dict[Path, LeafInFiles]:
    """Return leaves by path; see `LeafInFiles`."""
    return {leaf.path: LeafInFiles(leaf=leaf, reader=reader, names=names) for leaf in leaves}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafInFiles:
    """A leaf in the files of a folder, in its natural shape. Indexing reads a part of it.

    Attributes:
      leaf: its names.
      reader: the folder's files.
      names: the names of tensors in these files, by the names that the model's format has.
    """

    leaf: NamedLeaf
    reader: TensorReader
    names: Mapping[str, str]

    @property
    def shape(self) -> tuple[int, ...]:
        """The natural shape of the leaf."""
        return self.leaf.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the parts that are read."""
        return np.dtype(np.float32)

    def __getitem__(self, inside: tuple[slice, ...]) -> np.ndarray:
        """Read a part.

        Raises:
          ValueError: a number is not finite, or a file is damaged.
        """
        leaf, names = self.leaf, self.names
        if not leaf.is_stacked:
            return _oriented(self.reader, leaf, names[leaf.tensors[0]], inside)
        values = np.empty([s.stop - s.start for s in inside], np.float32)
        for layer, out in zip(leaf.tensors[inside[0]], values):
            out[...] = _oriented(self.reader, leaf, names[layer], inside[1:])
        return values


def _oriented(
    reader: TensorReader, leaf: NamedLeaf, name: str, inside: tuple[slice, ...]
) -> np.ndarray:
    """Read a part of a tensor; the tensor is a leaf or one layer of it.

    Raises:
      ValueError: a number is not finite.
    """
    part = reader.read(name, inside[::-1] if leaf.is_transposed else inside)
    if bad := part.size - np.count_nonzero(np.isfinite(part)):
        raise ValueError(
            f"the tensor {name} in {reader.tensors[name].file} holds {bad} numbers that are NaN or "
            f"infinite, of {part.size} in the part that was read; take weights that were saved "
            "before their training diverged"
        )
    return part.T if leaf.is_transposed else part
