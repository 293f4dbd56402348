"""`export_params`: parameters as safetensors files that other programs read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeroxla.checkpoint.weights.export_files import ExportLayout, export_leaves
from zeroxla.checkpoint.weights.origin import Origin, origin_of
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

    def lay_out(opened: WeightSource) -> ExportLayout:
        merged, own = _merged(opened, model)
        leaves, others = _layout(merged, own, dtype, config or {})
        origin = None
        if like is not None:
            origin = origin_of(like, leaves, abstract(own), config)
            leaves, others = origin.leaves, {**others, **origin.files}
        plan = _plan(leaves, dtype, max_shard_size, origin)
        return ExportLayout(source=merged, leaves=leaves, plan=plan, others=others, origin=origin)

    return export_leaves(source, folder, lay_out, progress)


def _merged(source: WeightSource, model: Any) -> tuple[WeightSource, Any]:
    """Return the parameters without adapters, and the model that they belong to."""
    if isinstance(model, LoraModel):
        return MergedSource(source, model.plan), model.model
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
    leaves: list[NamedLeaf], dtype: str, max_shard_size: int | str, origin: Origin | None
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
