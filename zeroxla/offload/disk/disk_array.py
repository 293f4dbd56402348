"""`DiskArray`: an array of a training state that is in the processes' files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.offload.disk.pages import ALIGNMENT
from zeroxla.offload.disk.shards import Shard, shards_of
from zeroxla.offload.disk.state_file import StateFile
from zeroxla.offload.disk.versions import Version
from zeroxla.offload.update.rows import Rows


class DiskShape(jax.ShapeDtypeStruct):
    """The shape, dtype and sharding of a `DiskArray`."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def given_for(
    shape: jax.ShapeDtypeStruct, make: Callable[[], jax.Array]
) -> jax.Array | Callable[[], jax.Array]:
    """Return a parameter as `Step.init_from` takes it: the array that `make` returns. If the
    parameter goes to disk it is `make` itself, which is called once the parameter before is being
    written."""
    return make if isinstance(shape, DiskShape) else make()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class DiskArray:
    """A global array of a state, split over a mesh. The shards of this process's devices are in the
    process's file.

    Attributes:
      name: its name in the state.
      shape: its stored shape, padding included.
      dtype: the dtype of its elements.
      sharding: its sharding on the mesh once it is read.
      file: the file that holds it.
      version: the version of the file that it belongs to.
      layer_dims: the dims along which each layer can be read by itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    file: StateFile
    version: Version
    layer_dims: tuple[int, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The number of bytes, over all processes."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Return whether a later step has put another version in force."""
        return self.version is not self.file.version

    def read(self, rows: Rows | None = None) -> ArrivingArray:
        """Begin to read the array, or some of its rows. Raises as `check` does."""
        self.check()
        shape = self.shape if rows is None else rows.of(self.shape)
        shards = self.shards(rows)
        arriving = [ArrivingShard(shard, self.file, self.version) for shard in shards]
        return ArrivingArray(shape, self.dtype, self.sharding, arriving)

    def check(self) -> None:
        """Check that the array can still be read.

        Raises:
          ValueError: a later step has put another version in force, and no one holds this one.
        """
        if not self.file.can_read(self.version):
            raise ValueError(
                f"{self.name} is of a state that is no more: a later step, or a restored "
                f"checkpoint, has written {self.file.path}; go on with the state that this returned"
            )

    def shards(self, rows: Rows | None = None) -> list[Shard]:
        """Return the shards of the array, or of some of its rows, that this process's devices
        hold."""
        found = shards_of(self.name, self.sharding, self.shape, self.layer_dims)
        return found if rows is None else [shard.only(rows) for shard in found]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the whole array on this host, padding included."""
        found = np.empty(self.shape, self.dtype)
        for arriving in self.read().shards:
            found[arriving.shard.index] = arriving.data(self.dtype)
        return found if dtype is None else found.astype(dtype)

    def __repr__(self) -> str:
        return f"DiskArray({self.name}, {self.dtype}{list(self.shape)}, {self.file.path})"


class ArrivingShard:
    """A shard that is being read.

    Attributes:
      shard: the shard.
    """

    def __init__(self, shard: Shard, file: StateFile, version: Version) -> None:
        self.shard, self._pool, self._buffer = shard, file.pool, None
        sizes = [file.nbytes_of(part.name) for part in shard.parts]
        into: list[np.ndarray | None] = [None] * len(sizes)
        if len(sizes) > 1 and shard.is_stack and all(n % ALIGNMENT == 0 for n in sizes):
            self._buffer = file.pool.take(sum(sizes))[: sum(sizes)]
            starts = itertools.accumulate(sizes, initial=0)
            into = [self._buffer[i : i + n] for i, n in zip(starts, sizes, strict=False)]
        self._readings = [
            file.read(part.name, version, x) for part, x in zip(shard.parts, into, strict=True)
        ]

    def wait(self) -> None:
        """Wait until it is read or has failed. Raises nothing."""
        for reading in self._readings:
            reading.wait()

    def data(self, dtype: np.dtype) -> np.ndarray:
        """Wait, and return the shard in host memory. Nothing else uses this memory."""
        found = [reading.result() for reading in self._readings]
        shape, parts = self.shard.shape, self.shard.parts
        if len(found) == 1 or self._buffer is not None:
            whole = found[0] if self._buffer is None else self._buffer
            return whole.view(dtype).reshape(shape)
        nbytes = sum(x.nbytes for x in found)
        whole = self._pool.take(nbytes)[:nbytes].view(dtype).reshape(shape)
        for part, x in zip(parts, found, strict=True):
            whole[part.index] = x.view(dtype).reshape(part.shape)
        return whole


@dataclasses.dataclass(frozen=True, slots=True)
class ArrivingArray:
    """An array that is being read.

    Attributes:
      shape, dtype, sharding: the array's.
      shards: this process's shards of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    shards: Sequence[ArrivingShard]

    def wait(self) -> None:
        """Wait until it is read or has failed. Raises nothing."""
        for shard in self.shards:
            shard.wait()

    def result(self, memory_kind: str | None = None) -> jax.Array:
        """Wait, and return the array on the devices, or in a memory of their hosts."""
        parts = []
        for arriving in self.shards:
            data = arriving.data(self.dtype)
            for device in arriving.shard.devices:
                where = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
                parts.append(jax.device_put(data, where, may_alias=True))
        sharding = self.sharding.with_memory_kind(memory_kind) if memory_kind else self.sharding
        return jax.make_array_from_single_device_arrays(self.shape, sharding, parts)


def write(shards: Sequence[Shard], array: jax.Array, file: StateFile) -> list[Future[int]]:
    """Begin to write the next version of an array, or of some of its rows. Waits until the array is
    computed.

    Args:
      shards: the shards to write, from `DiskArray.shards`.
      array: the new values. The caller must keep it until the returned futures have ended.
      file: the file to write to.
    """
    local = {shard.device: shard.data for shard in array.addressable_shards}
    futures = []
    for shard in shards:
        data = np.asarray(local[shard.devices[0]])
        for part in shard.parts:
            futures += file.write(part.name, data[part.index])
    return futures


def in_memory(x: jax.Array | DiskArray) -> jax.Array:
    """Return an array, read from the disk if it is there. It raises as `DiskArray.read` does."""
    return x.read().result() if isinstance(x, DiskArray) else x
