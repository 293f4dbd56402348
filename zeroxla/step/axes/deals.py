"""Deals: brings the stored shards of a leaf to the devices that compute with its parts, and back.

A leaf is stored in shards over all devices, like any other, whatever its parts are: any optimizer
sees natural arrays, and a checkpoint fits any axes. Its shards are cut along another dim than its
parts, and the devices of the axis hold shards that follow each other. So one exchange of shards
over the axis, once in a step, leaves each device with a shard of its part, which is gathered from
the devices that compute with the same part.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.placement import AxisPart, Placement
from zeroxla.offload.disk.desk import Desk
from zeroxla.offload.disk.tickets import is_ticket
from zeroxla.offload.memory_kinds import to_device
from zeroxla.split.atoms import Dim
from zeroxla.split.layout import planned_dims
from zeroxla.split.split_axis import SplitAxis


@dataclasses.dataclass(frozen=True, slots=True)
class Deals:
    """Deals the leaves of a model.

    Attributes:
      placements: how the leaves are stored.
      desk: reads shards on disk.
    """

    placements: tuple[Placement, ...]
    desk: Desk

    @property
    def parts(self) -> tuple[tuple[AxisPart, ...], ...]:
        """The parts of each leaf; () if no axis splits any."""
        found = tuple(p.parts for p in self.placements)
        return found if any(found) else ()

    def to_parts(self, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this device's shards of the parts that it computes with.

        Args:
          stored: the shards that it stores, tickets for those on disk.

        Cost: each device receives (1 - 1/length) of its shards of the leaves that an axis splits,
        once in a step. It holds all of them through the step, those of the host's memory and of its
        disk included.
        """
        with jax.named_scope("deal"):
            pairs = zip(stored, self.placements, strict=True)
            return [_to_part(self._here(x, p), p) if p.parts else x for x, p in pairs]

    def _here(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Return a shard in device memory, which a ticket may stand for."""
        if not is_ticket(x):
            return to_device(x)
        world = math.prod(map(lax.axis_size, placement.axes))
        return self.desk.redeem(x, placement.part_shape(world), lax.axis_index(placement.axes))

    def from_parts(self, shards: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Undo `to_parts`, for gradients; None for frozen leaves stays None."""
        with jax.named_scope("deal"):
            pairs = zip(shards, self.placements, strict=True)
            return [_from_part(x, p) if x is not None and p.parts else x for x, p in pairs]


def _to_part(x: jax.Array, placement: Placement) -> jax.Array:
    shape = placement.shape
    for part in placement.parts:
        axis, dim = _axis(part, shape)
        shape = _shape_of_part(shape, part)
        if placement.dim is None:
            x = axis.take_along(x, part.dim, dim)
            continue
        sent = axis.parts_along(x, part.dim, dim)
        received = lax.all_to_all(sent, part.axis, split_axis=0, concat_axis=0, tiled=True)
        x = jnp.moveaxis(received, 0, placement.dim)
        x = x.reshape(*x.shape[: placement.dim], -1, *x.shape[placement.dim + 2 :])
    return x


def _from_part(x: jax.Array, placement: Placement) -> jax.Array:
    shapes = [placement.shape]
    for part in placement.parts:
        shapes.append(_shape_of_part(shapes[-1], part))
    for part, shape in zip(reversed(placement.parts), reversed(shapes[:-1]), strict=True):
        axis, dim = _axis(part, shape)
        if placement.dim is None:
            received = lax.all_gather(x, part.axis)
        else:
            z = placement.dim
            apart = x.reshape(*x.shape[:z], part.length, -1, *x.shape[z + 1 :])
            sent = jnp.moveaxis(apart, z, 0)
            received = lax.all_to_all(sent, part.axis, split_axis=0, concat_axis=0, tiled=True)
        x = axis.joined_along(received, part.dim, dim)
    return x


def _axis(part: AxisPart, shape: tuple[int, ...]) -> tuple[SplitAxis, Dim]:
    dims = planned_dims(shape, part.dim, part.pieces)
    return SplitAxis(parts=part.length, name=part.axis), dims[part.dim]


def _shape_of_part(shape: tuple[int, ...], part: AxisPart) -> tuple[int, ...]:
    return tuple(part.size if d == part.dim else n for d, n in enumerate(shape))
