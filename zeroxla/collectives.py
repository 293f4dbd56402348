"""Gather and reduce-scatter of a unit over two hops, one collective per hop.

The law: gathered = post(all_gather(pre(shard))); shard gradient = reduce_scatter(pre(gradient)).

`pre` casts a unit's shards to the wire dtype and lays them end to end in one flat wire; `post` cuts
the gathered wire into leaves. Shards are stored device-major (shard index = device * nodes + node),
so the hop over `node` leaves each device with one contiguous 1/devices piece, the hop over `device`
completes the leaf, and nothing is permuted; the reduce walks the same way back.

A flat collective over both axes moves 4.5x to 7x the bytes between hosts; there is none here.

Shapes: D devices per node, N nodes, n elements in a unit's wire per device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh import DEVICE, NODE
from zeroxla.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The collectives of one training setup; every method runs inside `shard_map`.

    Attributes:
      nodes: length of the axis `node`.
      devices: length of the axis `device`.
      wire_dtype: dtype in which leaves are gathered and the model computes.
      reduce_dtype: dtype in which gradients travel; sums are always in float32.
    """

    nodes: int
    devices: int
    wire_dtype: jnp.dtype
    reduce_dtype: jnp.dtype

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    def gather(
        self, shards: Sequence[jax.Array], placements: Sequence[Placement]
    ) -> list[jax.Array]:
        """Gather the leaves of a unit.

        Args:
          shards: what this device stores of each leaf, in master dtype.
          placements: of each leaf; all split.

        Returns:
          Each leaf whole, in its natural shape and the wire dtype.

        Cost: each device receives (1 - 1/world) x the leaves in the wire dtype, padding included;
        a host receives that of its share between hosts, once.
        """
        if not shards:
            return []
        pieces = [_split_first(s, p).ravel() for s, p in zip(shards, placements, strict=True)]
        with jax.named_scope("gather"):
            wire_n = jnp.concatenate([p.astype(self.wire_dtype) for p in pieces])
            wire_n = _as_bits(wire_n)
            wire_Nn = _all_gather(wire_n, NODE, self.nodes)
            wire_DNn = _all_gather(wire_Nn, DEVICE, self.devices)
            wire_DNn = _from_bits(wire_DNn, self.wire_dtype)
            sizes = [p.size for p in pieces]
            return [
                _natural(piece, placement, self.world)
                for piece, placement in zip(_cut(wire_DNn, sizes), placements, strict=True)
            ]

    def reduce(
        self, gradients: Sequence[jax.Array], placements: Sequence[Placement]
    ) -> list[jax.Array]:
        """Sum each leaf's gradient over all devices and keep this device's shard of it.

        Args:
          gradients: one per leaf, in its natural shape, any floating dtype.
          placements: of each leaf; all split.

        Returns:
          The shards of the sums, float32, in the shape that a device stores.

        Cost: each device receives (1 - 1/world) x the leaves in the reduce dtype.
        """
        if not gradients:
            return []
        with jax.named_scope("reduce"):
            layouts = [
                self._shard_major(g.astype(self.reduce_dtype), p)
                for g, p in zip(gradients, placements, strict=True)
            ]
            wire_DNn = jnp.concatenate(layouts, axis=2)
            wire_Nn = self._reduce_scatter(wire_DNn, DEVICE, self.devices)
            wire_n = self._reduce_scatter(wire_Nn, NODE, self.nodes)
            pieces = _cut(wire_n, [x.shape[2] for x in layouts])
            return [
                self._as_shard(piece, placement)
                for piece, placement in zip(pieces, placements, strict=True)
            ]

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum a small vector over all devices, hop by hop; not for what grows with the model."""
        if not x.size:
            return x
        for axis, length in ((DEVICE, self.devices), (NODE, self.nodes)):
            if length > 1:
                x = lax.psum(x, axis)
        return x

    def rank(self) -> jax.Array:
        """This device's data-parallel index, node * devices per node + device: int32."""
        return lax.axis_index(NODE) * self.devices + lax.axis_index(DEVICE)

    def _shard_major(self, x: jax.Array, placement: Placement) -> jax.Array:
        """Lay a whole leaf out as [D, N, elements of one shard]."""
        x = _split_first(placement.stored(x), placement)
        return x.reshape(self.devices, self.nodes, -1)

    def _as_shard(self, piece: jax.Array, placement: Placement) -> jax.Array:
        assert placement.dim is not None
        stored = placement.stored_shape
        rest = stored[: placement.dim] + stored[placement.dim + 1 :]
        piece = piece.reshape(stored[placement.dim] // self.world, *rest)
        return jnp.moveaxis(piece, 0, placement.dim)

    def _reduce_scatter(self, wire: jax.Array, axis: str, length: int) -> jax.Array:
        """[length, ...] -> float32 [...]: the sum over `axis` of the slice at this device's index.

        In 16 bit the slices travel by all_to_all and are summed here in float32: each value is
        rounded once per hop, where a ring would round at every step.
        """
        if length == 1:
            return wire[0].astype(jnp.float32)
        wire = wire.astype(self.reduce_dtype)
        if self.reduce_dtype == jnp.float32:
            return lax.psum_scatter(wire, axis, scatter_dimension=0, tiled=False)
        received = lax.all_to_all(_as_bits(wire), axis, split_axis=0, concat_axis=0, tiled=True)
        return jnp.sum(_from_bits(received, self.reduce_dtype), axis=0, dtype=jnp.float32)


def _all_gather(x: jax.Array, axis: str, length: int) -> jax.Array:
    if length == 1:
        return x[None]
    return lax.all_gather(x, axis, axis=0, tiled=False)


def _split_first(x: jax.Array, placement: Placement) -> jax.Array:
    assert placement.dim is not None
    return jnp.moveaxis(x, placement.dim, 0)


def _natural(piece_DNs: jax.Array, placement: Placement, world: int) -> jax.Array:
    """[D, N, elements of one shard] -> the whole leaf."""
    assert placement.dim is not None
    stored = placement.stored_shape
    rest = stored[: placement.dim] + stored[placement.dim + 1 :]
    whole = piece_DNs.reshape(stored[placement.dim], *rest)
    return placement.natural(jnp.moveaxis(whole, 0, placement.dim))


def _cut(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Cut the last dim into consecutive pieces of `sizes`."""
    assert x.shape[-1] == sum(sizes), (x.shape, sizes)
    ends = itertools.accumulate(sizes)
    return [
        lax.slice_in_dim(x, end - size, end, axis=x.ndim - 1)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _as_bits(x: jax.Array) -> jax.Array:
    """Show 16-bit floats as uint16: XLA's CPU backend would widen them to float32 on the wire."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _from_bits(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
