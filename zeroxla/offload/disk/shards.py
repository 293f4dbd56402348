"""`Shard` and `Part`: how an array is divided in the processes' files, by shard and by layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from zeroxla.offload.update.rows import Rows


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A piece of an array with a name of its own in a file: a shard, or a layer of one.

    Attributes:
      name: its name in the file.
      index: its place within the shard.
      shape: its shape. If it is a layer, layer dims have length 1.
    """

    name: str
    index: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A part of an array that devices of this process hold.

    Attributes:
      index: its place within the array.
      devices: the devices of this process that hold it.
      shape: its shape.
      parts: the parts that make it up, in the order of layers, the last layer dim running fastest.
    """

    index: tuple[slice, ...]
    devices: tuple[jax.Device, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def is_stack(self) -> bool:
        """Whether its parts lie one after another in its memory."""
        dims = [d for d, n in enumerate(self.parts[0].shape) if n != self.shape[d]]
        return not dims or all(n == 1 for n in self.parts[0].shape[: dims[-1] + 1])

    def only(self, rows: Rows) -> Shard:
        """Return the shard's part of some rows of the array. Each row must be a part by itself."""

        def moved(part: Part) -> Part:
            layer = part.index[rows.dim].start - rows.start
            index = tuple(
                slice(layer, layer + 1) if d == rows.dim else at for d, at in enumerate(part.index)
            )
            return dataclasses.replace(part, index=index)

        there = range(rows.start, rows.stop)
        return dataclasses.replace(
            self,
            shape=rows.of(self.shape),
            parts=tuple(moved(p) for p in self.parts if p.index[rows.dim].start in there),
        )


def shards_of(
    name: str, sharding: NamedSharding, shape: Sequence[int], layer_dims: Sequence[int] = ()
) -> list[Shard]:
    """Return the different shards of an array that this process's devices hold.

    Args:
      name: the array's name.
      sharding: the array's sharding.
      shape: the array's shape.
      layer_dims: the dims along which each layer is a part, so that it can be read by itself. They
        are not split.
    """
    devices: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    indices: dict[tuple[tuple[int, int, int], ...], tuple[slice, ...]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        assert index is not None
        key = tuple(s.indices(n) for s, n in zip(index, shape, strict=True))
        devices.setdefault(key, []).append(device)
        indices[key] = index
    found = []
    for key, index in indices.items():
        own = f"{name}[{', '.join(f'{start}:{stop}' for start, stop, _ in key)}]"
        mine = tuple(stop - start for start, stop, _ in key)
        parts = _parts(own, mine, layer_dims)
        found.append(Shard(index, tuple(devices[key]), mine, tuple(parts)))
    return found


def sizes_of(
    name: str, shape: jax.ShapeDtypeStruct, layer_dims: Sequence[int] = ()
) -> dict[str, int]:
    """Return the sizes in bytes of this process's parts of an array, by their names in the file."""
    assert isinstance(shape.sharding, NamedSharding)
    return {
        part.name: math.prod(part.shape) * shape.dtype.itemsize
        for shard in shards_of(name, shape.sharding, shape.shape, layer_dims)
        for part in shard.parts
    }


def _parts(name: str, shape: tuple[int, ...], layer_dims: Sequence[int]) -> list[Part]:
    if not layer_dims:
        return [Part(name, (slice(None),) * len(shape), shape)]
    inside = tuple(1 if d in layer_dims else n for d, n in enumerate(shape))
    parts = []
    for layer in np.ndindex(*(shape[d] for d in layer_dims)):
        at = dict(zip(layer_dims, layer, strict=True))
        index = tuple(
            slice(at[d], at[d] + 1) if d in at else slice(None) for d in range(len(shape))
        )
        parts.append(Part(f"{name}#{','.join(map(str, layer))}", index, inside))
    return parts
