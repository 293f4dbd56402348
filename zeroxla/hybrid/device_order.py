"""Moves shards to the devices that would store them if no axis split the work on one row.

On a mesh with such axes the shards of a leaf lie along them in an order that fits the leaf's parts.
The reshard for generation sees the devices of a node as one axis, and wants shards in the order of
that axis. As both orders cut the same dim into as many shards, each device sends its shard to one
other and receives one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.mesh.axes import DEVICE, LEAF_AXES, NODE, PIPE, split_axes
from zeroxla.mesh.placement import Placement
from zeroxla.offload.memory_kinds import to_device
from zeroxla.program.compat import mesh_context


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceOrder:
    """The order of the devices of a training mesh.

    Attributes:
      mesh: the training mesh.
      placements: the placements of the stored leaves.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    @property
    def plain(self) -> tuple[Placement, ...]:
        """The placements after `apply`: with the devices of a node as the one axis `device`."""
        if not split_axes(self.mesh):
            return self.placements
        return tuple(dataclasses.replace(p, axes=_plain_axes(p), parts=()) for p in self.placements)

    def apply(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return stored leaves in this order.

        Cost: each device receives at most its shards once, and holds them a second time.
        """
        if not split_axes(self.mesh):
            return list(leaves)
        with mesh_context(self.mesh):
            return self._program(list(leaves))

    @functools.cached_property
    def inside(self) -> tuple[str, ...]:
        """The axes inside a node, in the order of the mesh."""
        return tuple(a for a in self.mesh.axis_names if a in (DEVICE, *split_axes(self.mesh)))

    @functools.cached_property
    def _program(self) -> jax.stages.Wrapped:
        def local(leaves: list[jax.Array]) -> list[jax.Array]:
            pairs = zip(leaves, self.placements, strict=True)
            return [self._move(to_device(x), p) for x, p in pairs]

        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=([p.spec for p in self.placements],),
            out_specs=[self._spec(p) for p in self.placements],
            check_vma=False,
        )
        return jax.jit(run)

    def _axes(self, placement: Placement) -> tuple[str, ...]:
        """Return the axes of a leaf in the new order."""
        return (*self.inside, NODE, *((PIPE,) if PIPE in placement.axes else ()))

    def _spec(self, placement: Placement) -> PartitionSpec:
        return dataclasses.replace(placement, axes=self._axes(placement)).spec

    def _move(self, shard: jax.Array, placement: Placement) -> jax.Array:
        """Send a shard to the device that has its number in the new order."""
        axes = self._axes(placement)
        if placement.dim is None or axes == placement.axes:
            return shard
        # JAX wants the axes of a permutation in the order of the mesh.
        names = tuple(axis for axis in self.mesh.axis_names if axis in axes)
        has, wants = (self._numbers(names, order) for order in (placement.axes, axes))
        device_of = np.argsort(wants)
        return lax.ppermute(shard, names, list(enumerate(device_of[has].tolist())))

    def _numbers(self, names: Sequence[str], order: Sequence[str]) -> np.ndarray:
        """Return the number of each device along `order`, devices in the order of `names`."""
        lengths = [self.mesh.shape[axis] for axis in order]
        numbers = np.arange(math.prod(lengths)).reshape(lengths)
        return numbers.transpose([order.index(axis) for axis in names]).ravel()


def _plain_axes(placement: Placement) -> tuple[str, ...]:
    return (*LEAF_AXES, *((PIPE,) if PIPE in placement.axes else ()))
