"""Hops: in which order a leaf passes the mesh axes, and where its secondary shard lies.

A gather is two runs of hops: the outer ones leave each device with its secondary shard, the inner
ones complete the leaf. By default the first is the axis `node` and the second the axis `device`, so
the secondary shards of a node's devices make up the leaf.

Shards are stored device-major, shard index = device * nodes + node. An all-gather keeps the order
only where it joins shards that follow each other, so a secondary group of h devices is

    h = devices / g: the devices of one node whose index is equal modulo g
    h = devices * k: all devices of the k nodes whose index is equal modulo nodes / k

and nothing is ever permuted, whatever h is: a state stays as it is when h changes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import DEVICE, NODE

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One collective over one mesh axis.

    Attributes:
      axis: the mesh axis.
      size: devices that exchange with each other.
      groups: of indices along the axis that do; the whole axis if None.
    """

    axis: str
    size: int
    groups: Groups | None = None

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Join the arrays of the group along `dim`."""
        return lax.all_gather(x, self.axis, axis=dim, tiled=True, axis_index_groups=self.groups)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hops:
    """The hops of a mesh.

    Attributes:
      nodes: length of the axis `node`.
      devices: length of the axis `device`.
      hpz_size: devices that share a secondary shard: a divisor of `devices`, or a multiple of it
        that divides nodes * devices.
    """

    nodes: int
    devices: int
    hpz_size: int

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    @property
    def num_outer(self) -> int:
        """Shards in a secondary shard."""
        return self.world // self.hpz_size

    @property
    def outer(self) -> tuple[Hop, ...]:
        """From a shard to the secondary shard."""
        if self.hpz_size > self.devices:
            rest = self.num_outer
            hops = [Hop(axis=NODE, size=rest, groups=_neighbours(self.nodes, rest))]
        else:
            rest = self.devices // self.hpz_size
            hops = [
                Hop(axis=NODE, size=self.nodes),
                Hop(axis=DEVICE, size=rest, groups=_neighbours(self.devices, rest)),
            ]
        return tuple(hop for hop in hops if hop.size > 1)

    @property
    def inner(self) -> tuple[Hop, ...]:
        """From the secondary shard to the leaf."""
        if self.hpz_size > self.devices:
            rest = self.num_outer
            hops = [
                Hop(axis=NODE, size=self.nodes // rest, groups=_equal_modulo(self.nodes, rest)),
                Hop(axis=DEVICE, size=self.devices),
            ]
        else:
            rest = self.devices // self.hpz_size
            groups = _equal_modulo(self.devices, rest)
            hops = [Hop(axis=DEVICE, size=self.hpz_size, groups=groups)]
        return tuple(hop for hop in hops if hop.size > 1)

    def shard_index(self) -> jax.Array:
        """Which of a leaf's shards this device stores: int32, inside `shard_map`."""
        return lax.axis_index(DEVICE) * self.nodes + lax.axis_index(NODE)

    def outer_index(self) -> jax.Array:
        """Which of its secondary shard's shards this device stores: int32, inside `shard_map`."""
        return self.shard_index() % self.num_outer


def run_gather(x: jax.Array, dim: int, hops: tuple[Hop, ...]) -> jax.Array:
    """Gather along `dim`, hop after hop."""
    for hop in hops:
        x = hop.gather(x, dim)
    return x


def as_bits(x: jax.Array) -> jax.Array:
    """Show 16-bit floats as uint16: XLA's CPU backend would widen them to float32 on the wire."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return what `as_bits` was given."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _neighbours(length: int, size: int) -> Groups | None:
    """Cut an axis into runs of `size`."""
    if size == length:
        return None
    return tuple(tuple(range(start, start + size)) for start in range(0, length, size))


def _equal_modulo(length: int, modulus: int) -> Groups | None:
    """Cut an axis into the indices that are equal modulo `modulus`."""
    if modulus == 1:
        return None
    return tuple(tuple(range(first, length, modulus)) for first in range(modulus))
