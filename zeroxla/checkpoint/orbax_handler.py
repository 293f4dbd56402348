"""Writes and reads a training state with Orbax, in natural shapes, with a checksum of every file.

Orbax writes each array as the devices hold it, shard by shard, padding included. Before a
checkpoint is made final each padded array is cut to its natural shape, which changes a line of its
metadata and none of its data. The result is an ordinary Orbax checkpoint: without zeroxla,
`orbax.checkpoint.StandardCheckpointer().restore(folder)` reads it as NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from zeroxla.checkpoint.about import About
from zeroxla.checkpoint.checksums import sum_rest, write_sums
from zeroxla.checkpoint.disk_arrays import DiskHandler
from zeroxla.checkpoint.entries import Entry
from zeroxla.checkpoint.errors import root_cause
from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.paths import Path as Name

BUFFER_BYTES = 256 * 2**20
"""Bytes on their way between files and devices while a state is read; the largest array's if that
is more."""

SAVE_TIMEOUT_S = 3600
"""Seconds after which a write that has not ended counts as failed."""


class StateHandler(ocp.AsyncCheckpointHandler):
    """Writes and reads the arrays of a state."""

    def __init__(self) -> None:
        handlers = ocp.type_handlers
        self._arrays = ocp.PyTreeCheckpointHandler(
            type_handler_registry=handlers.create_type_handler_registry(
                (jax.Array, handlers.ArrayHandler()), (DiskArray, DiskHandler())
            )
        )

    async def async_save(self, directory: Any, args: SaveState) -> list[Any]:
        """Copy the arrays off the devices; return the futures that write them."""
        tree = traverse_util.unflatten_dict({p: e.array for p, e in args.found.items()})
        try:
            writes = await self._arrays.async_save(directory, args=ocp.args.PyTreeSave(tree))
        except Exception as error:  # `_Write` raises it, where all processes hear of it
            writes = [_Failed(error)]
        return [_Write(self._arrays, writes or [], Path(directory), args)]

    def save(self, directory: Any, args: SaveState) -> None:
        raise NotImplementedError("Orbax saves through async_save")

    def finalize(self, directory: Any) -> None:
        """Do nothing: the write itself does the last work, so that all processes hear of a failure
        there."""

    def restore(self, directory: Any, args: RestoreState) -> dict[Name, Any]:
        """Read arrays; each device's part goes straight to it."""
        # Orbax refuses an array that is as large as its limit.
        largest = max(math.prod(x.shape) * x.dtype.itemsize for x in args.targets.values())
        limit = (max(largest, BUFFER_BYTES) + 2**20) / 10**9
        tree = traverse_util.unflatten_dict(dict(args.targets))
        wanted = jax.tree.map(_restore_args, tree)
        read = ocp.args.PyTreeRestore(item=tree, restore_args=wanted, partial_restore=True)
        arrays = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)
        try:
            return traverse_util.flatten_dict(arrays.restore(directory, args=read))
        finally:
            arrays.close()

    def close(self) -> None:
        self._arrays.close()


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """Arguments of a save: arrays by name, their description, and a name that no other save has."""

    found: Mapping[Name, Entry]
    about: About
    name: str


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """Arguments of a restore: stored shapes with shardings, by name. An array without a sharding is
    read as a NumPy array."""

    targets: Mapping[Name, jax.ShapeDtypeStruct]


class _Write(ocp.future.Future):  # pyright: ignore[reportAttributeAccessIssue]
    """The work of a save that is left when the arrays are off the devices."""

    def __init__(
        self, arrays: ocp.PyTreeCheckpointHandler, writes: list[Any], folder: Path, args: SaveState
    ) -> None:
        self._arrays, self._writes, self._folder, self._args = arrays, writes, folder, args

    def result(self, timeout: float | None = None) -> None:
        """Wait until the files are written and summed, here and in all processes."""
        timeout = SAVE_TIMEOUT_S if timeout is None else timeout

        def share(topic: str, action: Callable[[float], None]) -> None:
            def act() -> None:
                try:
                    action(timeout)
                except Exception as error:
                    raise OSError(root_cause(error)) from error

            # A process that failed alone would leave the others waiting.
            together(topic, act, timeout=timeout, name=self._args.name)

        share("checkpoint's files", self._write)
        share("checkpoint's end", self._finish)

    def _write(self, timeout: float) -> None:
        for future in self._writes:
            future.result(timeout)
        number = jax.process_index()
        mine = self._folder / f"ocdbt.process_{number}"
        files = (file for file in mine.rglob("*") if file.is_file())
        write_sums(self._folder, f"process_{number}", files)

    def _finish(self, timeout: float) -> None:
        del timeout  # nothing here waits
        if jax.process_index() != 0:
            return
        self._arrays.finalize(self._folder)  # type: ignore[arg-type]  (Orbax has a path type of its own)
        _cut(self._folder, {p: e.shape for p, e in self._args.found.items() if e.is_padded})
        # The file holds the shardings of the stored shapes; natural shapes may not divide so.
        (self._folder / "_sharding").unlink(missing_ok=True)
        self._args.about.write(self._folder)
        sum_rest(self._folder)


class _Failed(ocp.future.Future):  # pyright: ignore[reportAttributeAccessIssue]
    """A write that failed when it was begun."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> None:
        raise self._error


def open_array(folder: Path, path: Name) -> ts.TensorStore:
    """Open an array of a checkpoint, to read parts of it.

    Args:
      folder: the folder of the state.
      path: the array's name.
    """
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{'.'.join(path)}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True).result()


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
