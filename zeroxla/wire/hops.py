"""Hops: in which order a leaf passes the mesh axes, and which devices share its secondary shards.

A gather is two runs of hops. The outer hops leave each device with its secondary shard, the inner
hops complete the leaf. By default the outer hop is over `node` and the inner one over `device`, so
the secondary shards of a node's devices make up the leaf.

Shards are stored device-major: shard index = device * nodes + node. An all-gather keeps the order
only if it joins shards that follow each other. A secondary group of h devices is therefore

    h = devices / g: the devices of one node whose index is equal modulo g
    h = devices * k: all devices of the k nodes whose index is equal modulo nodes / k

Nothing is ever permuted, so a state fits every h.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import DEVICE, NODE, PIPE

Groups = tuple[tuple[int, ...], ...]
FLOAT32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One collective over one mesh axis.

    Attributes:
      axis: the mesh axis, or several, the outermost first.
      size: number of devices that exchange with each other.
      groups: indices along the axis, in groups that exchange with each other; None if the whole
        axis does.
    """

    axis: str | tuple[str, ...]
    size: int
    groups: Groups | None = None

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Join the arrays of a group's devices along `dim`."""
        return lax.all_gather(x, self.axis, axis=dim, tiled=True, axis_index_groups=self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hops:
    """The hops of a gather on a mesh.

    Attributes:
      nodes: length of the axis `node`.
      devices: length of the axis `device`; of `inside` together, if there are more axes.
      hpz_size: number of devices whose secondary shards make up a leaf. It divides `devices`, or
        is a multiple of `devices` that divides nodes * devices.
      inside: the axes inside a node over which leaves are split, the outermost first.
      lengths: the lengths of the axes that split work.
    """

    nodes: int
    devices: int
    hpz_size: int
    inside: tuple[str, ...] = (DEVICE,)
    lengths: tuple[tuple[str, int], ...] = ()

    def over(self, axes: Sequence[str]) -> Hops:
        """Return the hops of leaves that are split over some axes: `device`, `node`, and axes that
        split work, which count as a part of `device`."""
        inside = tuple(axis for axis in axes if axis not in (NODE, PIPE))
        if inside == self.inside:
            return self
        lengths = dict(self.lengths)
        assert self.inside == (DEVICE,), self
        more = math.prod(lengths[axis] for axis in inside if axis != DEVICE)
        return dataclasses.replace(
            self, devices=self.devices * more, hpz_size=self.hpz_size * more, inside=inside
        )

    @property
    def device_axis(self) -> str | tuple[str, ...]:
        """The axes `inside`, as collectives take them."""
        return self.inside[0] if len(self.inside) == 1 else self.inside

    @property
    def all_inside(self) -> tuple[str, ...]:
        """All axes inside a node."""
        return (DEVICE, *(axis for axis, _ in self.lengths))

    @property
    def world(self) -> int:
        """Number of devices that share a leaf."""
        return self.nodes * self.devices

    @property
    def num_outer(self) -> int:
        """Number of shards in a secondary shard."""
        return self.world // self.hpz_size

    @property
    def outer(self) -> tuple[Hop, ...]:
        """The hops from a shard to the secondary shard, the first one first."""
        if self.hpz_size > self.devices:
            rest = self.num_outer
            hops = [Hop(axis=NODE, size=rest, groups=_neighbours(self.nodes, rest))]
        else:
            rest = self.devices // self.hpz_size
            hops = [
                Hop(axis=NODE, size=self.nodes),
                Hop(axis=self.device_axis, size=rest, groups=_neighbours(self.devices, rest)),
            ]
        return tuple(hop for hop in hops if hop.size > 1)

    @property
    def inner(self) -> tuple[Hop, ...]:
        """The hops from the secondary shard to the leaf, the first one first."""
        if self.hpz_size > self.devices:
            rest = self.num_outer
            hops = [
                Hop(axis=NODE, size=self.nodes // rest, groups=_equal_modulo(self.nodes, rest)),
                Hop(axis=self.device_axis, size=self.devices),
            ]
        else:
            rest = self.devices // self.hpz_size
            groups = _equal_modulo(self.devices, rest)
            hops = [Hop(axis=self.device_axis, size=self.hpz_size, groups=groups)]
        return tuple(hop for hop in hops if hop.size > 1)

    def shard_index(self) -> jax.Array:
        """Return this device's index among the shards of a leaf: int32, inside `shard_map`."""
        return lax.axis_index(self.device_axis) * self.nodes + lax.axis_index(NODE)

    def outer_index(self) -> jax.Array:
        """Return this device's index among the shards of its secondary shard: int32, inside
        `shard_map`."""
        return self.shard_index() % self.num_outer


def run_gather(x: jax.Array, dim: int, hops: tuple[Hop, ...]) -> jax.Array:
    """Gather x along `dim`, hop after hop."""
    for hop in hops:
        x = hop.gather(x, dim)
    return x


def as_bits(x: jax.Array) -> jax.Array:
    """View 16-bit floats as uint16, because XLA's CPU backend would send them as float32."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undo `as_bits`; `dtype` is the dtype of the floats."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _neighbours(length: int, size: int) -> Groups | None:
    """Cut an axis into runs of `size` indices; return None for one run."""
    if size == length:
        return None
    return tuple(tuple(range(start, start + size)) for start in range(0, length, size))


def _equal_modulo(length: int, modulus: int) -> Groups | None:
    """Group the indices of an axis that are equal modulo `modulus`; return None for one group."""
    if modulus == 1:
        return None
    return tuple(tuple(range(first, length, modulus)) for first in range(modulus))
