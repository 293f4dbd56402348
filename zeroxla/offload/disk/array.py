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


class DiskShape(jax.ShapeDtypeStruct):
    """The shape of a `DiskArray`."""

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
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
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    file: StateFile
    version: Version

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
        """Begin to read it.

        Raises:
          ValueError: a later step has put another version in force, and nobody holds this one.
        """
        if not self.file.can_read(self.version):
            raise ValueError(
                f"{self.name} is of a state that is no more: a later step, or a restored "
                f"checkpoint, has written {self.file.path}; go on with the state that this returned"
            )
        shards = shards_of(self.name, self.sharding, self.shape)
        return Arriving(
            self, [self.file.read(shard.name, self.version) for shard in shards], shards
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return it whole on this host, padding included."""
        found = np.empty(self.shape, self.dtype)
        arriving = self.read()
        for shard, data in zip(arriving.shards, arriving.data(), strict=True):
            found[shard.index] = data
        return found if dtype is None else found.astype(dtype)

    def __repr__(self) -> str:
        return f"DiskArray({self.name}, {self.dtype}{list(self.shape)}, {self.file.path})"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A part of an array that devices of this process hold.

    Attributes:
      name: in the file.
      index: of the part within the array.
      devices: that hold it.
      shape: of the part.
    """

    name: str
    index: tuple[slice, ...]
    devices: tuple[jax.Device, ...]
    shape: tuple[int, ...]


def shards_of(name: str, sharding: NamedSharding, shape: Sequence[int]) -> list[Shard]:
    """Return the different parts of an array that this process's devices hold."""
    parts: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    indices: dict[tuple[tuple[int, int, int], ...], tuple[slice, ...]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        assert index is not None
        key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
        parts.setdefault(key, []).append(device)
        indices[key] = index
    return [
        Shard(
            f"{name}[{', '.join(f'{start}:{stop}' for start, stop, _ in key)}]",
            indices[key],
            tuple(devices),
            tuple(stop - start for start, stop, _ in key),
        )
        for key, devices in parts.items()
    ]


class Arriving:
    """An array that is being read."""

    def __init__(self, array: DiskArray, readings: list[Reading], shards: list[Shard]) -> None:
        self.array, self.shards, self._readings = array, shards, readings

    def wait(self) -> None:
        """Wait until it has come, or failed to."""
        for reading in self._readings:
            reading.wait()

    def data(self) -> list[np.ndarray]:
        """Wait; return the shards in host memory, which nothing else uses."""
        dtype = self.array.dtype
        return [
            reading.result().view(dtype).reshape(shard.shape)
            for reading, shard in zip(self._readings, self.shards, strict=True)
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


def write(name: str, array: jax.Array, file: StateFile) -> list[Future[int]]:
    """Begin to write an array's next version; waits until it is computed.

    The array must be kept until what is returned has ended.
    """
    assert isinstance(array.sharding, NamedSharding)
    data = {shard.device: shard.data for shard in array.addressable_shards}
    return [
        future
        for shard in shards_of(name, array.sharding, array.shape)
        for future in file.write(shard.name, np.asarray(data[shard.devices[0]]))
    ]


def sizes_of(name: str, shape: jax.ShapeDtypeStruct) -> dict[str, int]:
    """Return the bytes of this process's shards of an array, by their names in the file."""
    assert isinstance(shape.sharding, NamedSharding)
    return {
        shard.name: int(np.prod(shard.shape)) * shape.dtype.itemsize
        for shard in shards_of(name, shape.sharding, shape.shape)
    }
