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
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh import DEVICE, NODE
from zeroxla.placement import Placement

# A shard of at least this many elements travels by itself: joining it to others would copy it, and
# its leaf once more, for the latency of one collective.
ALONE_ELEMENTS = 2**14


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
        return self.cut(self.gather_wires(shards, placements), placements)

    def gather_wires(
        self, shards: Sequence[jax.Array], placements: Sequence[Placement]
    ) -> list[jax.Array]:
        """Run the collectives of `gather`; return what each gave, 16-bit floats as their bits.

        A tie to a gather needs these very arrays: a tie to a leaf would copy one that is cut from a
        wire, and XLA drops from a barrier what nothing else reads, such as another view of it.
        """
        wires = [s.astype(self.wire_dtype) for s in shards]
        alone, fused = self._grouped(placements)
        with jax.named_scope("gather"):
            gathered = [self._two_hops(wires[i], placements[i].split_dim) for i in alone]
            if fused:
                flat = [_split_first(wires[i], placements[i]).ravel() for i in fused]
                gathered.append(self._two_hops(jnp.concatenate(flat)[None], 0))
        return gathered

    def cut(self, wires: Sequence[jax.Array], placements: Sequence[Placement]) -> list[jax.Array]:
        """Return the leaves that are in gathered wires."""
        alone, fused = self._grouped(placements)
        whole: dict[int, jax.Array] = {}
        with jax.named_scope("gather"):
            arrived = [_from_bits(wire, self.wire_dtype) for wire in wires]
            for i, wire in zip(alone, arrived, strict=False):
                whole[i] = placements[i].natural(wire)
            if fused:
                sizes = [self._shard_size(placements[i]) for i in fused]
                for i, piece_Ws in zip(fused, _cut(arrived[-1], sizes), strict=True):
                    whole[i] = _natural(piece_Ws, placements[i])
        return [whole[i] for i in range(len(placements))]

    def _grouped(self, placements: Sequence[Placement]) -> tuple[list[int], list[int]]:
        """Return which leaves travel alone, and which are joined."""
        joins = [self._shard_size(p) < ALONE_ELEMENTS for p in placements]
        return [i for i, j in enumerate(joins) if not j], [i for i, j in enumerate(joins) if j]

    def _shard_size(self, placement: Placement) -> int:
        return math.prod(placement.stored_shape) // self.world

    def _two_hops(self, wire: jax.Array, dim: int) -> jax.Array:
        """Gather along `dim`, first over `node`, then over `device`: device-major order."""
        bits = _as_bits(wire)
        for axis, length in ((NODE, self.nodes), (DEVICE, self.devices)):
            if length > 1:
                bits = lax.all_gather(bits, axis, axis=dim, tiled=True)
        return bits

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
        stored = [
            p.stored(g.astype(self.reduce_dtype))
            for g, p in zip(gradients, placements, strict=True)
        ]
        alone, fused = self._grouped(placements)
        shards: dict[int, jax.Array] = {}
        with jax.named_scope("reduce"):
            for i in alone:
                shards[i] = self._two_hops_back(stored[i], placements[i].split_dim)
            if fused:
                rows = [
                    _split_first(stored[i], placements[i]).reshape(self.world, -1) for i in fused
                ]
                wire_1n = self._two_hops_back(jnp.concatenate(rows, axis=1), 0)
                # Cut here, not in the optimizer's kernels, which leaves of one shape then share.
                pieces = lax.optimization_barrier(_cut(wire_1n[0], [x.shape[1] for x in rows]))
                for i, piece in zip(fused, pieces, strict=True):
                    shards[i] = self._as_shard(piece, placements[i])
        return [shards[i] for i in range(len(gradients))]

    def _two_hops_back(self, x: jax.Array, dim: int) -> jax.Array:
        """Sum over all devices and keep this device's slice along `dim`, in float32."""
        for axis, length in ((DEVICE, self.devices), (NODE, self.nodes)):
            if length > 1:
                x = self._reduce_scatter(x, dim, axis, length)
        return x.astype(jnp.float32)

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

    def _as_shard(self, piece: jax.Array, placement: Placement) -> jax.Array:
        stored = placement.stored_shape
        rest = stored[: placement.split_dim] + stored[placement.split_dim + 1 :]
        piece = piece.reshape(stored[placement.split_dim] // self.world, *rest)
        return jnp.moveaxis(piece, 0, placement.split_dim)

    def _reduce_scatter(self, x: jax.Array, dim: int, axis: str, length: int) -> jax.Array:
        """One hop: the float32 sum over `axis` of the slice of `dim` at this device's index.

        In 16 bit the slices travel by all_to_all and are summed here in float32: each value is
        rounded once per hop, where a ring would round at every step.
        """
        x = x.astype(self.reduce_dtype)
        if self.reduce_dtype == jnp.float32:
            return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
        slices = x.reshape(*x.shape[:dim], length, x.shape[dim] // length, *x.shape[dim + 1 :])
        received = lax.all_to_all(
            _as_bits(slices), axis, split_axis=dim, concat_axis=dim, tiled=True
        )
        return jnp.sum(_from_bits(received, self.reduce_dtype), axis=dim, dtype=jnp.float32)


def _split_first(x: jax.Array, placement: Placement) -> jax.Array:
    return jnp.moveaxis(x, placement.split_dim, 0)


def _natural(piece_Ws: jax.Array, placement: Placement) -> jax.Array:
    """[W, elements of one shard] -> the whole leaf."""
    stored = placement.stored_shape
    rest = stored[: placement.split_dim] + stored[placement.split_dim + 1 :]
    whole = piece_Ws.reshape(stored[placement.split_dim], *rest)
    return placement.natural(jnp.moveaxis(whole, 0, placement.split_dim))


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
