"""`DiskWriter`: fills the file of a state with its first version, or with a restored one."""

from __future__ import annotations

import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape, write
from zeroxla.offload.disk.shards import shards_of, sizes_of
from zeroxla.offload.disk.state_file import StateFile, another_state
from zeroxla.program.paths import leaf_path
from zeroxla.step.state import TrainState

_BYTES_UNDER_WAY = 256 * 2**20

# A later state of this process takes over the file of an earlier one, which is lost.
_open: weakref.WeakValueDictionary[Path, StateFile] = weakref.WeakValueDictionary()


class DiskWriter:
    """Writes a version of all arrays that a state has on disk, one array at a time.

    Attributes:
      shapes: the shapes of these arrays, by their position among the leaves of parameters and
        optimizer state.
    """

    def __init__(self, state: TrainState, folder: str) -> None:
        """Open the file, or make it.

        Args:
          state: the state's shapes, as `Step.abstract_state` gives them.
          folder: the folder of the file.

        Raises:
          ValueError: in every process, if the folder of one cannot be written or has too little
            room, or another process or another state has the file.
        """
        trees = {"params": state.params, "opt_state": state.opt_state}
        leaves = jax.tree_util.tree_flatten_with_path(list(trees.values()))[0]
        self.shapes = {i: x for i, (_, x) in enumerate(leaves) if isinstance(x, DiskShape)}
        names = tuple(trees)
        self._names = {
            i: f"{names[leaves[i][0][0].idx]}/{leaf_path(leaves[i][0][1:])}" for i in self.shapes
        }
        # An array that a loop slices is read one layer at a time, by the loop, and by the update if
        # the whole array is too large.
        placements = enumerate(p for placed in state.placements for p in placed)
        self._layer_dims = {i: p.layer_dims for i, p in placements if i in self.shapes}
        sizes: dict[str, int] = {}
        for i, shape in self.shapes.items():
            sizes |= sizes_of(self._names[i], shape, self._layer_dims[i])
        name = f"process-{jax.process_index()}-of-{jax.process_count()}.state"
        path = Path(folder).expanduser().resolve() / name
        self._file = together("state on disk", lambda: _file(path, sizes))
        self._file.wait_for_readers()
        self._under_way: deque[tuple[list[Future[int]], jax.Array]] = deque()
        self._bytes = 0

    def write(self, i: int, array: jax.Array) -> None:
        """Begin to write an array in its stored form. If 256 MiB are under way, wait for earlier
        arrays first.

        Raises:
          OSError: the disk fails.
        """
        sharding, dims = self.shapes[i].sharding, self._layer_dims[i]
        assert isinstance(sharding, NamedSharding)
        shards = shards_of(self._names[i], sharding, array.shape, dims)
        futures = write(shards, array, self._file)
        self._under_way.append((futures, array))
        self._bytes += array.nbytes
        while self._bytes > _BYTES_UNDER_WAY:
            futures, array = self._under_way.popleft()
            for future in futures:
                future.result()
            self._bytes -= array.nbytes

    def finish(self) -> dict[int, DiskArray]:
        """Put the written version in force; return its arrays, by position.

        Raises:
          OSError: this process's disk fails.
          ValueError: another process's disk fails.
        """
        together("state on disk", self._file.commit)
        self._under_way.clear()
        return {
            i: DiskArray(
                name=self._names[i],
                shape=shape.shape,
                dtype=np.dtype(shape.dtype),
                sharding=shape.sharding,  # type: ignore[arg-type]
                file=self._file,
                version=self._file.version,
                layer_dims=self._layer_dims[i],
            )
            for i, shape in self.shapes.items()
        }

    def abandon(self) -> None:
        """Forget what was written."""
        self._file.abandon()


def _file(path: Path, sizes: dict[str, int]) -> StateFile:
    known = _open.get(path)
    if known is not None and known.blocks.is_there:
        if not known.is_of(sizes):
            raise another_state(path)
        return known
    _open[path] = file = StateFile(path, sizes)
    return file
