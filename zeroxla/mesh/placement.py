"""`Placement` and `place`: how an array is stored, which dim is split, and what padding it gets.

Leaves keep their natural shapes. One dim is split over `("device", "node")`, device-major. If no
dim divides by the world, the dim that wastes least is padded with zeros to the next multiple.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.config.offload import DISK
from zeroxla.mesh.axes import LEAF_AXES, PIPE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisPart:
    """Which part of a leaf a device computes with, along an axis that splits work.

    Attributes:
      axis: the mesh axis.
      length: its length.
      dim: the dim that is split.
      pieces: the pieces of that dim: (outer, size, inner), whose middle factor is split, or the
        size of one that every device has whole.
    """

    axis: str
    length: int
    dim: int
    pieces: tuple[tuple[int, int, int] | int, ...]

    @property
    def size(self) -> int:
        """The size of the dim in one part."""
        return sum(
            p if isinstance(p, int) else p[0] * -(-p[1] // self.length) * p[2] for p in self.pieces
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the elements of one array live.

    Attributes:
      shape: the natural shape.
      dim: the dim that is split over `axes`; None if every device holds the whole array.
      pad: number of zeros appended to `dim` to make it divide by the world.
      layer_dims: the dims along which the model's loops slice a scanned leaf. They are never split
        over `axes`.
      axes: the mesh axes over which `dim` is split, the outermost first.
      stage_dim: the layer dim that is also split over the stages of a pipeline, each of which uses
        the layers that its devices store; None if there is none.
      memory: the memory that the array lives in: JAX's kind of the host's memory, `disk`, or None
        for the device's own.
      parts: the part of a leaf that a device computes with, along each axis that splits it.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pad: int = 0
    layer_dims: tuple[int, ...] = ()
    axes: tuple[str, ...] = LEAF_AXES
    stage_dim: int | None = None
    memory: str | None = None
    parts: tuple[AxisPart, ...] = ()

    @property
    def of_part(self) -> Placement:
        """The placement of the part that a device computes with, over the devices that compute with
        the same part."""
        if not self.parts:
            return self
        shape = list(self.shape)
        for part in self.parts:
            shape[part.dim] = part.size
        axes = tuple(a for a in self.axes if a not in [part.axis for part in self.parts])
        return dataclasses.replace(self, shape=tuple(shape), axes=axes, parts=())

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in the state, with its padding."""
        if self.dim is None:
            return self.shape
        return tuple(n + self.pad * (d == self.dim) for d, n in enumerate(self.shape))

    @property
    def unsplit_layers(self) -> int | None:
        """The first layer dim that is not split over stages; None if there is none."""
        return next((d for d in self.layer_dims if d != self.stage_dim), None)

    @property
    def split_dim(self) -> int:
        """`dim`, for an array that is known to be split."""
        assert self.dim is not None, "the array is whole on every device"
        return self.dim

    def part_shape(self, parts: int) -> tuple[int, ...]:
        """Return the stored shape of a part, if the array is cut into equal parts along `dim`."""
        return tuple(
            n // parts if d == self.split_dim else n for d, n in enumerate(self.stored_shape)
        )

    @property
    def spec(self) -> PartitionSpec:
        """The array's partition spec on a mesh with these axes."""
        if self.dim is None:
            return PartitionSpec()
        names: list[str | tuple[str, ...] | None] = [None] * len(self.shape)
        names[self.dim] = self.axes
        if self.stage_dim is not None:
            names[self.stage_dim] = PIPE
        return PartitionSpec(*names[: max(self.dim, self.stage_dim or 0) + 1])

    @property
    def is_on_disk(self) -> bool:
        """Whether the array is in a file on the host's disk."""
        return self.memory == DISK

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Return the array's sharding, memory included. An array on disk gets the one it has once
        read."""
        memory = None if self.is_on_disk else self.memory
        return NamedSharding(mesh, self.spec, memory_kind=memory)

    def shard_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the shard that one device stores."""
        return self.sharding(mesh).shard_shape(self.stored_shape)

    def unstack(self, dim: int) -> Placement:
        """Return the placement of a slice along `dim`, a layer dim of a scanned leaf."""
        assert dim != self.dim, (dim, self)
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        inner = self.dim if self.dim is None or self.dim < dim else self.dim - 1
        layer_dims = tuple(d - (d > dim) for d in self.layer_dims if d != dim)
        stage_dim = self.stage_dim
        if stage_dim is not None:
            stage_dim = None if stage_dim == dim else stage_dim - (stage_dim > dim)
        assert not self.parts, "only the placement of a part is sliced"
        return dataclasses.replace(
            self, shape=shape, dim=inner, layer_dims=layer_dims, stage_dim=stage_dim
        )

    def natural(self, stored: jax.Array) -> jax.Array:
        """Return a stored array without its padding."""
        if not self.pad:
            return stored
        return jax.lax.slice_in_dim(stored, 0, self.shape[self.split_dim], axis=self.split_dim)

    def stored(self, natural: jax.Array) -> jax.Array:
        """Return an array with its padding appended."""
        if not self.pad:
            return natural
        widths = [(0, self.pad if d == self.dim else 0) for d in range(len(self.shape))]
        return jnp.pad(natural, widths)


def place(
    shape: Sequence[int],
    world: int,
    *,
    skip: Sequence[int] = (),
    axes: tuple[str, ...] = LEAF_AXES,
) -> Placement:
    """Choose the placement of an array.

    The first dim outside `skip` that divides by `world` is split. If none does, the dim whose
    padding adds the fewest elements is split. An array with fewer elements than devices stays
    whole: its shards together would be larger than the array.

    Args:
      shape: natural shape.
      world: number of devices that share the array.
      skip: dims that stay unsplit, such as the layer dim of a scanned leaf.
      axes: see `Placement`.

    >>> place((768, 50257), 8).dim
    0
    >>> found = place((50257, 13), 8)
    >>> found.dim, found.pad, found.axes
    (0, 7, ('device', 'node'))
    """
    whole = Placement(shape=tuple(shape), layer_dims=tuple(sorted(skip)), axes=axes)
    elements = math.prod(whole.shape)
    dims = [d for d in range(len(shape)) if d not in skip and shape[d] > 0]
    if elements < world or not dims:
        return whole
    for dim in dims:
        if shape[dim] % world == 0:
            return dataclasses.replace(whole, dim=dim)
    pads = {d: -shape[d] % world for d in dims}
    dim = min(dims, key=lambda d: (elements // shape[d] * pads[d], d))
    return dataclasses.replace(whole, dim=dim, pad=pads[dim])
