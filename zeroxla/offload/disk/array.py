"""`DiskArray`: an array of a training state that is in a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.offload.disk.file import Reading, StateFile, Version
from zeroxla.offload.disk.shards import Shard, shards_of


class DiskShape(jax.ShapeDtypeStruct):
    """The shape of a `DiskArray`."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class DiskArray:
    """A global array of a state, split over a mesh; what this process's devices own of it is in
    its file.

    Attributes:
      name: in the state.
      shape: as it is stored, padding included.
      dtype: of its elements.
      sharding: how it lies on the mesh when it has come.
      file: that it is in.
      version: of the file, that it is of.
      layer_dims: the dims along which each layer is read by itself, too.
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
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Whether a later step has put another version in force."""
        return self.version is not self.file.version

    def read(self) -> Arriving:
        """Begin to read it. Raises what `check` raises."""
        self.check()
        shards = self.shards()
        readings = [[self.file.read(p.name, self.version) for p in s.parts] for s in shards]
        return Arriving(self, readings, shards)

    def check(self) -> None:
        """Check that it can be read.

        Raises:
          ValueError: a later step has put another version in force, and nobody holds this one.
        """
        if not self.file.can_read(self.version):
            raise ValueError(
                f"{self.name} is of a state that is no more: a later step, or a restored "
                f"checkpoint, has written {self.file.path}; go on with the state that this returned"
            )

    def shards(self) -> list[Shard]:
        """Return what this process's devices hold of it."""
        return shards_of(self.name, self.sharding, self.shape, self.layer_dims)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return it whole on this host, padding included."""
        found = np.empty(self.shape, self.dtype)
        arriving = self.read()
        for shard, data in zip(arriving.shards, arriving.data(), strict=True):
            found[shard.index] = data
        return found if dtype is None else found.astype(dtype)

    def __repr__(self) -> str:
        return f"DiskArray({self.name}, {self.dtype}{list(self.shape)}, {self.file.path})"


class Arriving:
    """An array that is being read."""

    def __init__(
        self, array: DiskArray, readings: list[list[Reading]], shards: list[Shard]
    ) -> None:
        self.array, self.shards, self._readings = array, shards, readings

    def wait(self) -> None:
        """Wait until it has come, or failed to."""
        for parts in self._readings:
            for reading in parts:
                reading.wait()

    def data(self) -> list[np.ndarray]:
        """Wait; return the shards in host memory, which nothing else uses."""
        dtype = self.array.dtype
        return [
            shard.joined([reading.result() for reading in parts], dtype)
            for parts, shard in zip(self._readings, self.shards, strict=True)
        ]

    def result(self, memory_kind: str | None = None) -> jax.Array:
        """Wait; return the array on the devices, or in a memory of their hosts."""
        array = self.array
        parts = []
        for shard, data in zip(self.shards, self.data(), strict=True):
            for device in shard.devices:
                where = jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)
                parts.append(jax.device_put(data, where, may_alias=True))
        sharding = array.sharding.with_memory_kind(memory_kind) if memory_kind else array.sharding
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def write(
    name: str, array: jax.Array, file: StateFile, layer_dims: Sequence[int] = ()
) -> list[Future[int]]:
    """Begin to write an array's next version; waits until it is computed.

    The array must be kept until what is returned has ended.
    """
    assert isinstance(array.sharding, NamedSharding)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    futures = []
    for shard in shards_of(name, array.sharding, array.shape, layer_dims):
        data = np.asarray(shards[shard.devices[0]])
        for part in shard.parts:
            futures += file.write(part.name, data[part.index])
    return futures
