"""How each leaf is stored: which dim is split, what padding, what stays whole.

Leaves keep their natural shapes. One dim is split over `("device", "node")`, device-major; if none
divides by the world, one is padded with zeros to the next multiple, the one that wastes least.
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
class Placement:
    """Where the elements of one array live.

    Attributes:
      shape: the natural shape.
      dim: the dim that is split over (device, node); None if every device holds the whole array.
      pad: how many zeros are appended to `dim` so that it divides by the world.
      layer_dims: the dims along which the model's loops slice a scanned leaf; never split.
      axes: of the mesh, over which `dim` is split; the first one is the outermost.
      stage_dim: the layer dim that is split over the stages of a pipeline besides, each of which
        uses the layers that its devices store; None if none is.
      memory: JAX's kind of the host memory that it is offloaded to, or `disk`; None for the
        device's own.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    pad: int = 0
    layer_dims: tuple[int, ...] = ()
    axes: tuple[str, ...] = LEAF_AXES
    stage_dim: int | None = None
    memory: str | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in the state, padding included."""
        if self.dim is None:
            return self.shape
        return tuple(n + self.pad * (d == self.dim) for d, n in enumerate(self.shape))

    @property
    def unsplit_layers(self) -> int | None:
        """The first layer dim that no stages share; None if there is none."""
        return next((d for d in self.layer_dims if d != self.stage_dim), None)

    @property
    def split_dim(self) -> int:
        """`dim` of an array that is split."""
        assert self.dim is not None, "the array is whole on every device"
        return self.dim

    def part_shape(self, parts: int) -> tuple[int, ...]:
        """The stored shape of one of so many equal parts along `dim`."""
        return tuple(
            n // parts if d == self.split_dim else n for d, n in enumerate(self.stored_shape)
        )

    @property
    def spec(self) -> PartitionSpec:
        if self.dim is None:
            return PartitionSpec()
        names: list[str | tuple[str, ...] | None] = [None] * len(self.shape)
        names[self.dim] = self.axes
        if self.stage_dim is not None:
            names[self.stage_dim] = PIPE
        return PartitionSpec(*names[: max(self.dim, self.stage_dim or 0) + 1])

    @property
    def is_on_disk(self) -> bool:
        """Whether it is in a file, and comes to the device for the update alone."""
        return self.memory == DISK

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """How it lies on a mesh, and in which memory; of an array on disk when it has come."""
        memory = None if self.is_on_disk else self.memory
        return NamedSharding(mesh, self.spec, memory_kind=memory)

    def shard_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape of what one device stores."""
        return self.sharding(mesh).shard_shape(self.stored_shape)

    def unstack(self, dim: int) -> Placement:
        """The placement of a slice along `dim`, a scanned leaf's layer dim, which is not split."""
        assert dim != self.dim, (dim, self)
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        inner = self.dim if self.dim is None or self.dim < dim else self.dim - 1
        layer_dims = tuple(d - (d > dim) for d in self.layer_dims if d != dim)
        stage_dim = self.stage_dim
        if stage_dim is not None:
            stage_dim = None if stage_dim == dim else stage_dim - (stage_dim > dim)
        return dataclasses.replace(
            self, shape=shape, dim=inner, layer_dims=layer_dims, stage_dim=stage_dim
        )

    def natural(self, stored: jax.Array) -> jax.Array:
        """Drop the padding."""
        if not self.pad:
            return stored
        return jax.lax.slice_in_dim(stored, 0, self.shape[self.split_dim], axis=self.split_dim)

    def stored(self, natural: jax.Array) -> jax.Array:
        """Append the padding."""
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

    The first dim outside `skip` that divides by `world` is split. Where none does, the dim whose
    padding adds the fewest elements is. An array with fewer elements than devices stays whole: its
    shards would be larger than itself.

    Args:
      shape: natural shape.
      world: number of devices that share it.
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
