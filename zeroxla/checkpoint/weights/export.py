"""`export_params`: parameters as safetensors files that other programs read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zeroxla.checkpoint.weights.origin import origin_of
from zeroxla.checkpoint.weights.safetensors_writer import (
    DTYPES,
    FilePlan,
    Writer,
    make_plan,
    writing,
)
from zeroxla.checkpoint.weights.sources import MergedSource, WeightSource, open_source
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
from zeroxla.mesh.processes.together import together
from zeroxla.program.report import format_bytes
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

    With a model whose class has the attribute `hugging_face` (`GPT`, `Llama`) the folder is one
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
        are copied as they are; `dtype` is for tensors that were quantized there. Needs a model.
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
        dtypes: Mapping[str, str] = {}
        if like is not None:
            dtypes, files = origin_of(like, leaves, abstract(own), config)
            others = {**others, **files}
        plan = _plan(leaves, dtype, max_shard_size, dtypes)
        return ExportLayout(source=merged, leaves=leaves, plan=plan, others=others)

    return export_leaves(source, folder, lay_out, progress)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportLayout:
    """The contents of an export.

    Attributes:
      source: the leaves.
      leaves: the leaves to write, with their tensors.
      plan: the places of the tensors.
      others: contents of files that belong to the export, by name.
    """

    source: WeightSource
    leaves: list[NamedLeaf]
    plan: FilePlan
    others: Mapping[str, bytes]


def export_leaves(
    source: TrainState | str | Path,
    folder: str | Path,
    lay_out: Callable[[WeightSource], ExportLayout],
    progress: Callable[[int, int], None] | None,
) -> list[Path]:
    """Write an export, in the first process; see `export_params`.

    Args:
      source, folder, progress: as for `export_params`.
      lay_out: returns the contents; it may raise a ValueError.
    """
    folder = Path(folder).expanduser()
    is_writer = jax.process_index() == 0

    def prepare() -> ExportLayout | None:
        if not is_writer and not isinstance(source, TrainState):
            return None  # this process may not see the folder of a checkpoint
        layout = lay_out(open_source(source))
        if is_writer:
            _make_folder(folder, layout.plan)
        return layout

    layout = together("export", prepare)
    if layout is None:
        together("files of the export", lambda: None)
        return []
    failure = _write(layout, folder, progress if is_writer else None)
    together("files of the export", lambda: _raise(failure))
    return [folder / name for name in layout.plan.sizes]


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
    config = {**format.config(module, dtype=dtype), **more}
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
    leaves: list[NamedLeaf], dtype: str, max_shard_size: int | str, dtypes: Mapping[str, str]
) -> FilePlan:
    shapes = {name: leaf.tensor_shape for leaf in leaves for name in leaf.tensors}
    if not shapes:
        raise ValueError("there are no parameters to export")
    size = parse_size(max_shard_size)
    return make_plan(shapes, dtype=dtype, max_shard_bytes=size, dtypes=dtypes)


def _write(
    layout: ExportLayout, folder: Path, progress: Callable[[int, int], None] | None
) -> Exception | None:
    """Read every leaf, and write it in the first process; return the error of a write that failed.

    After such an error it goes on reading, because the other processes take part in that.
    """
    failure: Exception | None = None
    source, plan = layout.source, layout.plan
    left = iter(in_bundles(layout.leaves))
    try:
        with _writer(plan, folder, layout.others) as writer:
            done = 0
            for together_written in left:
                values = [source.read(leaf.path) for leaf in together_written]
                if writer is not None:
                    write_leaves(writer, together_written, values)
                done += sum(plan.bytes_of(name) for name in together_written[0].tensors)
                if progress is not None:
                    progress(done, plan.tensor_bytes)
                del values  # before the next leaf is read
    except OSError as error:
        failure = _not_writable(folder, error)
    except Exception as error:
        failure = error
    if source.is_collective and jax.process_count() > 1:
        for leaf in (leaf for bundle in left for leaf in bundle):
            source.read(leaf.path)
    return failure


def in_bundles(leaves: list[NamedLeaf]) -> list[list[NamedLeaf]]:
    """Return the leaves in groups that are written together: those that share a tensor."""
    bundles: dict[tuple[str, ...], list[NamedLeaf]] = {}
    for leaf in leaves:
        bundles.setdefault(leaf.tensors, []).append(leaf)
    return list(bundles.values())


def write_leaves(writer: Writer, leaves: list[NamedLeaf], values: list[np.ndarray]) -> None:
    """Write the tensors of a leaf, or of all leaves that share them."""
    depth, names = len(leaves[0].stack), leaves[0].tensors
    flat = [x.reshape(len(names), *x.shape[depth:]) for x in values]
    for i, name in enumerate(names):
        own = [x[i] for x in flat]
        parts = [x.T if leaf.is_transposed else x for leaf, x in zip(leaves, own, strict=True)]
        writer.write(name, _joined(leaves, parts))


def _joined(leaves: list[NamedLeaf], parts: list[np.ndarray]) -> np.ndarray:
    """Return the tensor that is made of the parts of leaves."""
    of_leaves = [leaf.part for leaf in leaves if leaf.part is not None]
    if not of_leaves:
        return parts[0]
    groups = of_leaves[0].groups
    grouped = {
        own.index: part.reshape(groups, -1, *part.shape[1:])
        for own, part in zip(of_leaves, parts, strict=True)
    }
    joined = np.concatenate([grouped[i] for i in sorted(grouped)], axis=1)
    return joined.reshape(-1, *joined.shape[2:])


@contextlib.contextmanager
def _writer(plan: FilePlan, folder: Path, others: Mapping[str, bytes]) -> Iterator[Writer | None]:
    """Write in the first process, and do nothing in the others."""
    if jax.process_index() != 0:
        yield None
        return
    with writing(plan, folder, others) as writer:
        yield writer


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


def _make_folder(folder: Path, plan: FilePlan) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _not_writable(folder, error) from error
    if free < plan.num_bytes:
        raise ValueError(
            f"the export needs {format_bytes(plan.num_bytes)}, and {folder} has "
            f"{format_bytes(free)} free; make room, or export bfloat16"
        )


def _not_writable(folder: Path, error: OSError) -> ValueError:
    wrong = ValueError(
        f"cannot write the export to {folder}: {error.strerror or error}; correct the path, its "
        "permissions or the space"
    )
    wrong.__cause__ = error
    return wrong


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
