"""`DiskWriter`: fills the file of a state with its first version, or with a restored one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape, write
from zeroxla.offload.disk.shards import shards_of, sizes_of
from zeroxla.offload.disk.step_file import StepFile
from zeroxla.program.paths import leaf_path
from zeroxla.step.state import TrainState

_BYTES_UNDER_WAY = 256 * 2**20


class DiskWriter:
    """Writes a version of all arrays that a state has on disk, one array at a time.

    Attributes:
      shapes: the shapes of these arrays, by their position among the leaves of parameters and
        optimizer state.
    """

    def __init__(self, state: TrainState, step_file: StepFile) -> None:
        """Open the file, or make it.

        Args:
          state: the state's shapes, as `Step.abstract_state` gives them.
          step_file: the file of the step's states. A state that is in it is lost.

        Raises:
          ValueError: in every process, if the folder of one cannot be written or has too little
            room.
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
        self._file = together("state on disk", lambda: step_file.open(sizes))
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
