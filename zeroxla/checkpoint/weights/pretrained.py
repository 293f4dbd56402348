"""`from_pretrained`: a training state with the weights in a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np

from zeroxla.checkpoint.weights.adapter_import import read_adapter
from zeroxla.checkpoint.weights.dequantize import Quantized
from zeroxla.checkpoint.weights.leaf_in_files import LeafInFiles, leaves_in_files
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader, check_dtype
from zeroxla.checkpoint.weights.tensor_names import (
    NamedLeaf,
    abstract,
    check_shapes,
    format_leaves,
    format_of,
    shapes_of,
)
from zeroxla.frontend.base import to_nested
from zeroxla.frontend.lora.leaf_plan import BASE, LORA
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.mesh.processes.together import together
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


def from_pretrained(
    model: Any,
    folder: str | FilePath,
    step: Step,
    *,
    key: jax.Array | None = None,
    adapter: str | FilePath | None = None,
) -> TrainState:
    """Make a training state whose parameters come from a Hugging Face folder.

    Args:
      model: the step's model: a `GPT`, a function `rngs -> Decoder`, or another model with the
        attribute `hugging_face`. `zeroxla.models.from_hugging_face(folder)` builds one. With a
        model that `zeroxla.lora` made, the base is read, and the adapters are new, or those of
        `adapter`.
      folder: holds `config.json` and `model.safetensors`, or an index and its files, in float32,
        bfloat16 or float16, or in 8 bits of a kind that `config.json` names (docs/families.md). All
        processes must see it.
      step: a step of the model that has seen a batch (`init` or `abstract_state`).
      key: a PRNG key for dropout and the like. None means `jax.random.key(0)`.
      adapter: the folder of a PEFT adapter, for a model that `zeroxla.lora_from_adapter` made of
        it. None begins with new adapters.

    Returns:
      The state before the first step, its parameters float32.

    Raises:
      ImportError: the package safetensors is not installed.
      ValueError: the config contradicts the model (each key is named, with both values);
        a tensor is missing, unknown, of another shape or dtype, or holds a number that is not
        finite; a file is missing or damaged; the adapter is not of the model's adapters.

    Cost: of each leaf only the parts of this host's devices are read from the files, and host
    memory holds them for one leaf at a time. Parameters on disk are copied there one by one.
    """
    folder = FilePath(folder).expanduser()
    shapes = step.shapes()

    adapters = model if isinstance(model, LoraModel) else None
    if adapter is not None and adapters is None:
        raise ValueError(
            f"adapter={str(adapter)!r} for a model without adapters; give what "
            "zeroxla.lora_from_adapter(model, adapter) returns, to this function and to make_step"
        )

    def prepare() -> Any:
        naturals = shapes_of(adapters.plan.shapes) if adapters else natural_shapes(shapes)
        arrays = leaves_of_folder(adapters.model if adapters else model, naturals, folder)
        if adapters is None or adapter is None:
            return arrays
        return {BASE: to_nested(arrays), LORA: read_adapter(adapters, adapter)}

    arrays = together("pretrained weights", prepare)
    return step.init_from(arrays, jax.random.key(0) if key is None else key)


def leaves_of_folder(
    model: Any, naturals: Mapping[Path, tuple[int, ...]], folder: FilePath
) -> dict[Path, LeafInFiles]:
    """Return the leaves of a model in a Hugging Face folder; nothing of them is read yet.

    Args:
      model: a model with a Hugging Face format, without adapters.
      naturals: the natural shapes of its leaves.
      folder: the folder.

    Raises:
      ImportError, ValueError: as `from_pretrained`, but for numbers.
    """
    module = abstract(model)
    format = format_of(module)
    if format is None:
        raise ValueError(
            f"a {type(module).__name__} has no Hugging Face format; give a model with the "
            "attribute hugging_face, such as from_hugging_face builds"
        )
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
    if quantized is not None and not any(map(quantized.holds, reader.tensors.values())):
        raise ValueError(
            f"{folder / 'config.json'} says that weights are quantized as {quantized.method}, and "
            "no tensor is; remove quantization_config if they were dequantized, or download the "
            "folder anew"
        )
    names = find_tensors(reader, leaves, format, quantized)
    return leaves_in_files(leaves, reader, names, quantized)


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
        bare = format.bare(name if quantized is None else quantized.weight_of(name))
        if bare in there:
            raise ValueError(f"{reader.folder} holds both {there[bare]} and {name}; remove one")
        there[bare] = name
    wanted = {name: leaf for leaf in leaves for name in leaf.tensors}
    bare = {name: format.bare(name) for name in wanted}
    if missing := [name for name in wanted if bare[name] not in there]:
        raise ValueError(
            f"{reader.folder} lacks {_list(missing)}, which the model needs; give the folder of "
            "the whole model, or set tie in the model and the config as it was trained"
        )
    found = {name: there.pop(bare[name]) for name in wanted}
    _check_tied(reader, wanted, found, there, format)
    ignored = re.compile("|".join(format.ignored) or "(?!)")
    unknown = (x for x in there.items() if not ignored.fullmatch(x[0]) and not format.is_kept(x[0]))
    if extra := [name for _, name in unknown]:
        raise ValueError(
            f"{reader.folder} holds {_list(extra)}, for which the model has no place; build the "
            "model that these weights are of"
        )
    for name, leaf in wanted.items():
        stored = reader.tensors[found[name]]
        is_quantized = quantized is not None and quantized.holds(stored)
        if not is_quantized:
            check_dtype(found[name], stored)
        shape = quantized.shape_of(stored) if quantized is not None else stored.shape
        if shape != leaf.tensor_shape:
            raise ValueError(
                f"the tensor {found[name]} in {stored.file} has the shape {list(shape)}, "
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


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
