"""Writes an export: reads each leaf where it is, and writes its tensors in the first process."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from zeroxla.checkpoint.weights.origin import FolderOrigin
from zeroxla.checkpoint.weights.safetensors_writer import FilePlan, Writer, writing
from zeroxla.checkpoint.weights.sources import WeightSource, open_source
from zeroxla.checkpoint.weights.tensor_names import NamedLeaf
from zeroxla.mesh.processes.together import together
from zeroxla.program.report import format_bytes
from zeroxla.step.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportLayout:
    """The contents of an export.

    Attributes:
      source: the leaves.
      leaves: the leaves to write, with their tensors.
      plan: the places of the tensors.
      others: contents of files that belong to the export, by name.
      origin: the folder that the export is like; None for none.
    """

    source: WeightSource
    leaves: list[NamedLeaf]
    plan: FilePlan
    others: Mapping[str, bytes]
    origin: FolderOrigin | None = None


def export_leaves(
    source: TrainState | str | Path,
    folder: str | Path,
    lay_out: Callable[[WeightSource], ExportLayout],
    progress: Callable[[int, int], None] | None,
    island_own: bool = False,
) -> list[Path]:
    """Write an export, in the first process; see `export_params`.

    Args:
      source, folder, progress, island_own: as for `export_params`.
      lay_out: returns the contents; it may raise a ValueError.
    """
    folder = Path(folder).expanduser()
    is_writer = jax.process_index() == 0

    def prepare() -> ExportLayout | None:
        if not is_writer and not isinstance(source, TrainState):
            return None  # this process may not see the folder of a checkpoint
        layout = lay_out(open_source(source, island_own=island_own))
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
            if writer is not None and layout.origin is not None:
                for name in layout.origin.kept:
                    writer.write(name, layout.origin.read(name))
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
        parts = [
            np.swapaxes(x, -1, -2) if leaf.is_transposed else x
            for leaf, x in zip(leaves, own, strict=True)
        ]
        writer.write(name, _joined(leaves, parts))


def _joined(leaves: list[NamedLeaf], parts: list[np.ndarray]) -> np.ndarray:
    """Return the tensor that is made of the parts of leaves."""
    of_leaves = [leaf.part for leaf in leaves if leaf.part is not None]
    if not of_leaves:
        return parts[0]
    groups, dim = of_leaves[0].groups, leaves[0].rows_dim
    rows_first = [np.moveaxis(part, dim, 0) for part in parts]
    grouped = {
        own.index: part.reshape(groups, -1, *part.shape[1:])
        for own, part in zip(of_leaves, rows_first, strict=True)
    }
    joined = np.concatenate([grouped[i] for i in sorted(grouped)], axis=1)
    return np.moveaxis(joined.reshape(-1, *joined.shape[2:]), 0, dim)


@contextlib.contextmanager
def _writer(plan: FilePlan, folder: Path, others: Mapping[str, bytes]) -> Iterator[Writer | None]:
    """Write in the first process, and do nothing in the others."""
    if jax.process_index() != 0:
        yield None
        return
    with writing(plan, folder, others) as writer:
        yield writer


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
