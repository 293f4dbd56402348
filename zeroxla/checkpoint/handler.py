"""How Orbax writes and reads a training state: natural shapes, and sums of every file.

Orbax writes each array as the devices hold it, shard by shard, padding included. Before a
checkpoint is made final each padded array is cut to its natural shape, which changes a line of its
metadata and none of its data. What comes out is an ordinary Orbax checkpoint: without zeroxla,
`orbax.checkpoint.StandardCheckpointer().restore(folder)` reads it as NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from zeroxla.checkpoint.about import About
from zeroxla.checkpoint.logical import Entry
from zeroxla.checkpoint.logical import Path as Name
from zeroxla.checkpoint.sums import sum_rest, write_sums

BUFFER_GB = 1
"""Gigabytes on their way between files and devices, at most, besides a leaf that is larger."""


class StateHandler(ocp.AsyncCheckpointHandler):
    """Writes and reads the arrays of a state; one save at a time."""

    def __init__(self) -> None:
        self._arrays = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=BUFFER_GB)
        self._saving: SaveState | None = None

    async def async_save(self, directory: Any, args: SaveState) -> list[Any]:
        """Copy the arrays off the devices; return what writes them."""
        self._saving = args
        tree = traverse_util.unflatten_dict({p: e.array for p, e in args.found.items()})
        futures = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(tree))
        return [_Summed(futures or [], Path(directory))]

    def save(self, directory: Any, args: SaveState) -> None:
        raise NotImplementedError("Orbax saves through async_save")

    def finalize(self, directory: Any) -> None:
        """Cut padding and sum what is left; in the first process, when all have written."""
        assert self._saving is not None
        folder = Path(directory)
        self._arrays.finalize(directory)
        padded = {p: e.shape for p, e in self._saving.found.items() if e.is_padded}
        _cut(folder, padded)
        # The shardings that arrays had; those of natural shapes need not divide so.
        (folder / "_sharding").unlink(missing_ok=True)
        self._saving.about.write(folder)
        sum_rest(folder)

    def restore(self, directory: Any, args: RestoreState) -> dict[Name, Any]:
        """Read arrays; each device's part goes straight to it."""
        tree = traverse_util.unflatten_dict(dict(args.targets))
        wanted = jax.tree.map(_restore_args, tree)
        read = ocp.args.PyTreeRestore(item=tree, restore_args=wanted, partial_restore=True)
        return traverse_util.flatten_dict(self._arrays.restore(directory, args=read))

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """What to save: arrays by name, and what is said of them."""

    found: Mapping[Name, Entry]
    about: About


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """What to read: by name, stored shapes with shardings; without one, a NumPy array."""

    targets: Mapping[Name, jax.ShapeDtypeStruct]


class _Summed(ocp.future.Future):
    """A write, followed by the sums of what this process has written."""

    def __init__(self, futures: list[Any], folder: Path) -> None:
        self._futures, self._folder = futures, folder

    def result(self, timeout: float | None = None) -> None:
        for future in self._futures:
            future.result(timeout)
        number = jax.process_index()
        mine = self._folder / f"ocdbt.process_{number}"
        files = (file for file in mine.rglob("*") if file.is_file())
        write_sums(self._folder, f"process_{number}", files)


def _restore_args(target: jax.ShapeDtypeStruct) -> Any:
    if target.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=target.dtype)
    return ocp.ArrayRestoreArgs(
        global_shape=target.shape, dtype=target.dtype, sharding=target.sharding, strict=False
    )


def _cut(folder: Path, shapes: Mapping[Name, tuple[int, ...]]) -> None:
    cuts = ts.Transaction(atomic=True)
    for path, shape in shapes.items():
        array = open_array(folder, path).with_transaction(cuts)
        array.resize(exclusive_max=shape, resize_metadata_only=True).result()
    cuts.commit_sync()


def open_array(folder: Path, path: Name) -> ts.TensorStore:
    """Open an array of a checkpoint, to read parts of it.

    Args:
      folder: of the state.
      path: the array's name.
    """
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{'.'.join(path)}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
