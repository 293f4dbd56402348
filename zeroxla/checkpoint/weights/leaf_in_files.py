"""`LeafInFiles`: a leaf that is read from safetensors files, part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from zeroxla.checkpoint.weights.dequantize import Quantized
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.tensor_names import NamedLeaf
from zeroxla.program.paths import Path


def leaves_in_files(
    leaves: Iterable[NamedLeaf],
    reader: TensorReader,
    names: Mapping[str, str],
    quantized: Quantized | None = None,
) -> dict[Path, LeafInFiles]:
    """Return leaves by path; see `LeafInFiles`."""
    return {
        leaf.path: LeafInFiles(leaf=leaf, reader=reader, names=names, quantized=quantized)
        for leaf in leaves
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LeafInFiles:
    """A leaf in the files of a folder, in its natural shape. Indexing reads a part of it.

    Attributes:
      leaf: its names.
      reader: the folder's files.
      names: the names of tensors in these files, by the names that the model's format has.
      quantized: how the files' weights of 8 bits are to be read; None if there are none.
    """

    leaf: NamedLeaf
    reader: TensorReader
    names: Mapping[str, str]
    quantized: Quantized | None = None

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
        leaf = self.leaf
        names = np.array([self.names[name] for name in leaf.tensors], object).reshape(leaf.stack)
        depth = len(leaf.stack)
        if not depth:
            return self._oriented(names.item(), inside)
        values = np.empty([s.stop - s.start for s in inside], np.float32)
        chosen = names[inside[:depth]]
        for index in np.ndindex(chosen.shape):
            values[index] = self._oriented(str(chosen[index]), inside[depth:])
        return values

    def _oriented(self, name: str, inside: tuple[slice, ...]) -> np.ndarray:
        """Read a part of a tensor; the tensor is the leaf or one layer or expert of it.

        Raises:
          ValueError: a number is not finite.
        """
        leaf, reader = self.leaf, self.reader
        index = leaf.oriented(inside)
        if leaf.part is None:
            part = self._read(name, index)
        else:
            wider, dim = list(index), leaf.rows_dim
            wider[dim] = leaf.part.covering(index[dim])
            covering = np.moveaxis(self._read(name, tuple(wider)), dim, 0)
            part = np.moveaxis(leaf.part.of_covering(covering, index[dim]), 0, dim)
        if bad := part.size - np.count_nonzero(np.isfinite(part)):
            raise ValueError(
                f"the tensor {name} in {reader.tensors[name].file} holds {bad} numbers that are "
                f"NaN or infinite, of {part.size} in the part that was read; take weights that "
                "were saved before their training diverged"
            )
        return np.swapaxes(part, -1, -2) if leaf.is_transposed else part

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if self.quantized is not None and self.quantized.holds(self.reader.tensors[name]):
            return self.quantized.read(self.reader, name, index)
        return self.reader.read(name, index)
