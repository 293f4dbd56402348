"""`export_params`: parameters as safetensors files that other programs read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeroxla.checkpoint.weights.export_files import ExportLayout, export_leaves
from zeroxla.checkpoint.weights.origin import FolderOrigin, origin_of
from zeroxla.checkpoint.weights.pretrained import leaves_of_folder
from zeroxla.checkpoint.weights.safetensors_writer import (
    DTYPES,
    FilePlan,
    make_plan,
)
from zeroxla.checkpoint.weights.sources import MergedSource, WeightSource
from zeroxla.checkpoint.weights.tensor_names import (
    NamedLeaf,
    abstract,
    check_shapes,
    flat_leaves,
    format_leaves,
    format_of,
    shapes_of,
)
from zeroxla.frontend.lora.leaf_plan import BASE, LORA
from zeroxla.frontend.lora.model import LoraModel
from zeroxla.step.state import TrainState

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def export_params(
    source: TrainState | str | Path,
    folder: str | Path,
    *,
    model: Any = None,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    config: Mapping[str, Any] | None = None,
    like: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    island_own: bool = False,
    original: str | Path | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Write parameters as safetensors, with Hugging Face's names if the model has them.

    With a model that has the attribute `hugging_face` (`GPT`, `Decoder`) the folder is one
    that Transformers loads: `model.safetensors`, or several `model-00001-of-000NN.safetensors` and
    their index, and `config.json`. Any other parameters get their paths as names, "a.b.c", in the
    same files without a config.

    Files get their names when all are on disk; until then an older export in the folder stays.

    Args:
      source: a training state, the folder of a checkpoint, or a folder of several checkpoints,
        whose newest is taken.
      folder: the folder to write; made if missing. An older export in it is replaced.
      model: the model that the parameters belong to: a flax.linen module, a function `rngs -> nnx
        module`, or an nnx module. None gives flat names. For a model that `zeroxla.lora` made, and
        whose step has seen a batch, the adapters are merged, and the files belong to its model.
      dtype: "float32", "bfloat16" or "float16"; rounded to nearest, ties to even.
      max_shard_size: largest size of the tensors in a file: bytes, or text such as "500MB" (10^6)
        or "2GiB" (2^30). A larger tensor is alone in its file.
      config: further keys of config.json that no model knows, such as a tokenizer's special tokens.
      like: the Hugging Face folder that the weights came from. Tensors keep the dtypes that they
        have there, and its config.json, generation_config.json, tokenizer files and chat template
        are copied as they are; `dtype` is for tensors that were quantized there. Tensors that the
        model has no part in (the images of Gemma 3) are copied. Needs a model, and all processes
        must see the folder.
      progress: called after each leaf with the bytes written so far and the bytes of all tensors.
      island_own: write an island's own parameters. By default its checkpoint gives those that all
        islands share, which are evaluated.
      original: the Hugging Face folder of the base of a model with adapters, whose dense leaves are
        stored in 8 or 4 bits; for `report`.
      report: called with a sentence on what merging adapters onto such leaves has changed: the
        largest and the mean absolute difference of their weights from those of `original` with the
        adapters; without it, from the stored base before merging, which the adapters alone make.

    Returns:
      The files with tensors, in order.

    Raises:
      ValueError: the source, an option or the model do not fit; the folder cannot be written or
        lacks the space; a number is beyond the range of the dtype (named).

    In a run of several processes all must call this. Only the first one writes, into its folder.

    Cost: host memory for one leaf (a scanned leaf holds all layers) and a buffer of 32 MiB. From a
    state on devices of several processes, every device holds a whole leaf for a moment. A
    checkpoint's files are read twice: to check them, and to export them.

    >>> import tempfile, jax, numpy as np, zeroxla
    >>> from zeroxla.models import MLP
    >>> step = zeroxla.make_step(MLP.tiny(), zeroxla.make_mesh(nodes=1))
    >>> batch = {"image": np.zeros((8, 28, 28)), "label": np.zeros(8, int)}
    >>> state = step.init(jax.random.key(0), batch)
    >>> [file.name for file in export_params(state, tempfile.mkdtemp())]
    ['model.safetensors']
    """

    sources: list[MergedSource] = []

    def lay_out(opened: WeightSource) -> ExportLayout:
        merged, own = _merged(opened, model, original)
        sources.extend(x for x in (merged,) if isinstance(x, MergedSource))
        leaves, others = _layout(merged, own, dtype, config or {})
        origin = None
        if like is not None:
            origin = origin_of(like, leaves, abstract(own), config)
            leaves, others = origin.leaves, {**others, **origin.files}
        plan = _plan(leaves, dtype, max_shard_size, origin)
        return ExportLayout(source=merged, leaves=leaves, plan=plan, others=others, origin=origin)

    files = export_leaves(source, folder, lay_out, progress, island_own)
    for merged in sources:
        if report is not None and merged.change.count and files:
            form = model.frozen
            before = (
                f"the {form} base before merging (its original is not known)"
                if original is None
                else f"{original} with the adapters"
            )
            report(
                f"Merged onto a base in {form}: its {merged.change.count:,} weights differ from "
                f"those of {before} {merged.change.words}"
            )
    return files


def _merged(
    source: WeightSource, model: Any, original: str | Path | None
) -> tuple[WeightSource, Any]:
    """Return the parameters without adapters, and the model that they belong to."""
    if isinstance(model, LoraModel):
        leaves = None
        if original is not None:
            folder, naturals = Path(original).expanduser(), shapes_of(model.plan.shapes)
            leaves = leaves_of_folder(model.model, naturals, folder)
        return MergedSource(source, model.plan, leaves), model.model
    if {path[0] for path in source.shapes} == {BASE, LORA}:
        raise ValueError(
            f"{source.title} holds adapters beside their base; give model= what zeroxla.lora made, "
            "to export the two merged"
        )
    return source, model


def _layout(
    source: WeightSource, model: Any, dtype: str, more: Mapping[str, Any]
) -> tuple[list[NamedLeaf], dict[str, bytes]]:
    """Return the leaves with their tensors, and the files beside them."""
    check_export_dtype(dtype)
    module = abstract(model)
    format = format_of(module)
    if format is None:
        return flat_leaves(source.shapes), {}
    check_shapes(module, source.shapes, source.title)
    config = format.config(module, dtype=dtype)
    # The config of a model of text and images says nothing of its text alone, which is written.
    if more.get("model_type", config["model_type"]) == config["model_type"]:
        config |= more
    text = json.dumps(config, indent=2) + "\n"
    return format_leaves(source.shapes, format, module), {"config.json": text.encode()}


def check_export_dtype(dtype: str) -> None:
    """Check the dtype of an export.

    Raises:
      ValueError: tensors cannot have it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}; choose {', '.join(map(repr, DTYPES))}")


def _plan(
    leaves: list[NamedLeaf], dtype: str, max_shard_size: int | str, origin: FolderOrigin | None
) -> FilePlan:
    shapes = {name: leaf.tensor_shape for leaf in leaves for name in leaf.tensors}
    shapes |= {} if origin is None else origin.kept
    if not shapes:
        raise ValueError("there are no parameters to export")
    size = parse_size(max_shard_size)
    dtypes = {} if origin is None else origin.dtypes
    return make_plan(shapes, dtype=dtype, max_shard_bytes=size, dtypes=dtypes)


def parse_size(size: int | str) -> int:
    """Return a number of bytes.

    Raises:
      ValueError: the text is no number of bytes, or it is below 1.

    >>> parse_size("2GB"), parse_size("1.5 MiB")
    (2000000000, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", str(size).strip().upper())
    number = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if number < 1:
        raise ValueError(f"max_shard_size={size!r}; give bytes, or such as '500MB' or '2GiB'")
    return number
