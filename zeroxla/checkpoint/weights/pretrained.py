"""`from_pretrained`: a training state with the weights in a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np

from zeroxla.checkpoint.weights.dequantize import EIGHT_BITS, Quantized
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader, check_dtype
from zeroxla.checkpoint.weights.tensor_names import (
    NamedLeaf,
    abstract,
    check_shapes,
    format_leaves,
    format_of,
    shapes_of,
)
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.mesh.processes.together import together
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


def from_pretrained(
    model: Any, folder: str | FilePath, step: Step, *, key: jax.Array | None = None
) -> TrainState:
    """Make a training state whose parameters come from a Hugging Face folder.

    Args:
      model: the step's model: a `GPT`, a function `rngs -> Llama`, or another model whose class has
        the attribute `hugging_face`. `zeroxla.models.from_hugging_face(folder)` builds one. With a
        model that `zeroxla.lora` made, the base is read, and the adapters are new.
      folder: holds `config.json` and `model.safetensors`, or an index and its files, in float32,
        bfloat16 or float16. All processes must see it.
      step: a step of the model that has seen a batch (`init` or `abstract_state`).
      key: a PRNG key for dropout and the like. None means `jax.random.key(0)`.

    Returns:
      The state before the first step, its parameters float32.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the config contradicts the model (each key is named, with both values);
        a tensor is missing, unknown, of another shape or dtype, or holds a number that is not
        finite; a file is missing or damaged.

    Cost: of each leaf only the parts of this host's devices are read from the files, and host
    memory holds them for one leaf at a time. Parameters on disk are copied there one by one.
    """
    folder = FilePath(folder).expanduser()
    shapes = step.shapes()

    adapters = model if isinstance(model, LoraModel) else None

    def prepare() -> list[LeafInFiles]:
        module = abstract(model if adapters is None else adapters.model)
        format = format_of(module)
        if format is None:
            raise ValueError(
                f"a {type(module).__name__} has no Hugging Face format; give a model whose class "
                "has the attribute hugging_face, such as GPT or Llama"
            )
        naturals = shapes_of(adapters.plan.shapes) if adapters else natural_shapes(shapes)
        check_shapes(module, naturals, "the step")
        config = format.read_config(folder)
        if different := format.differences(config, module):
            raise ValueError(
                f"{folder / 'config.json'} is of another model: {'; '.join(different)}; build the "
                "model with zeroxla.models.from_hugging_face(folder)"
            )
        reader = TensorReader(folder)
        leaves = format_leaves(naturals, format, module)
        quantized = Quantized.of(config)
        names = find_tensors(reader, leaves, format, quantized)
        return [
            LeafInFiles(leaf=leaf, reader=reader, names=names, quantized=quantized)
            for leaf in leaves
        ]

    leaves = together("pretrained weights", prepare)
    key = jax.random.key(0) if key is None else key
    arrays = {leaf.leaf.path: leaf for leaf in leaves}
    return step.init_from(arrays, key)


def natural_shapes(state: TrainState) -> dict[Path, tuple[int, ...]]:
    """Return the natural shapes of a state's parameters."""
    paths = [path for path, _ in paths_of(state.params)]
    return {path: placed.shape for path, placed in zip(paths, state.placements[0], strict=True)}


def find_tensors(
    reader: TensorReader,
    leaves: list[NamedLeaf],
    format: Any,
    quantized: Quantized | None = None,
) -> dict[str, str]:
    """Return, for each tensor of the leaves, its name in the files.

    Raises:
      ValueError: a tensor is missing, has another shape or dtype, or is unknown.
    """
    there: dict[str, str] = {}
    for name in reader.tensors:
        if quantized is not None and quantized.is_beside(name, reader.tensors):
            continue
        bare = name.removeprefix(format.prefix)
        if bare in there:
            raise ValueError(f"{reader.folder} holds both {there[bare]} and {name}; remove one")
        there[bare] = name
    wanted = {name: leaf for leaf in leaves for name in leaf.tensors}
    bare = {name: name.removeprefix(format.prefix) for name in wanted}
    if missing := [name for name in wanted if bare[name] not in there]:
        raise ValueError(
            f"{reader.folder} lacks {_list(missing)}, which the model needs; give the folder of "
            "the whole model, or set tie in the model and the config as it was trained"
        )
    found = {name: there.pop(bare[name]) for name in wanted}
    _check_tied(reader, wanted, found, there, format)
    ignored = re.compile("|".join(format.ignored) or "(?!)")
    if extra := [name for short, name in there.items() if not ignored.fullmatch(short)]:
        raise ValueError(
            f"{reader.folder} holds {_list(extra)}, for which the model has no place; build the "
            "model that these weights are of"
        )
    for name, leaf in wanted.items():
        stored = reader.tensors[found[name]]
        if quantized is None or stored.dtype not in EIGHT_BITS:
            check_dtype(found[name], stored)
        if stored.shape != leaf.tensor_shape:
            raise ValueError(
                f"the tensor {found[name]} in {stored.file} has the shape {list(stored.shape)}, "
                f"and the model's leaf {leaf.name} needs {list(leaf.tensor_shape)}"
            )
    return found


def _check_tied(
    reader: TensorReader,
    wanted: Mapping[str, NamedLeaf],
    found: Mapping[str, str],
    there: dict[str, str],
    format: Any,
) -> None:
    """Remove the head of a tied model, which some files hold too, from the tensors that are
    left."""
    head, embedding = format.tensors[format.head], format.tensors[format.embedding]
    if head in wanted or head not in there:
        return
    names = there.pop(head), found[embedding]
    shapes = [reader.tensors[name].shape for name in names]
    same = shapes[0] == shapes[1] and all(
        np.array_equal(reader.read(names[0], rows), reader.read(names[1], rows))
        for rows in _rows(shapes[0])
    )
    if not same:
        raise ValueError(
            f"{reader.folder} holds a {names[0]} that is not {names[1]}, and the model has one "
            "array for both (tie=True); build it with tie=False, and set tie_word_embeddings to "
            "false in the config"
        )


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield parts of an array of this shape, a thousand rows each."""
    for first in range(0, shape[0], 1000):
        rows = slice(first, min(first + 1000, shape[0]))
        yield rows, *(slice(0, n) for n in shape[1:])


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
        index = inside[::-1] if leaf.is_transposed else inside
        if leaf.part is None:
            part = self._read(name, index)
        else:
            covering = self._read(name, (leaf.part.covering(index[0]), *index[1:]))
            part = leaf.part.of_covering(covering, index[0])
        if bad := part.size - np.count_nonzero(np.isfinite(part)):
            raise ValueError(
                f"the tensor {name} in {reader.tensors[name].file} holds {bad} numbers that are "
                f"NaN or infinite, of {part.size} in the part that was read; take weights that "
                "were saved before their training diverged"
            )
        return part.T if leaf.is_transposed else part

    def _read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if self.quantized is not None and self.reader.tensors[name].dtype in EIGHT_BITS:
            return self.quantized.read(self.reader, name, index)
        return self.reader.read(name, index)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
