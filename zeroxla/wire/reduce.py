"""Reducing the gradients of a unit to shards of their sum, hop after hop.

The way back of a gather: the hop over `device` leaves each device with a sum of 1/devices of the
leaf, the hop over `node` with its shard. Sums are in float32 on every hop. A quantized gradient is
cut into one wire for each shard; the wires of a hop are exchanged, dequantized, summed, and what
is left is quantized again for the next.

Shapes: L devices of a hop, R rows (shards) that a device still holds, n elements of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.mesh.placement import Placement
from zeroxla.wire.bundles import Parcel, bundle
from zeroxla.wire.error_feedback import quantize_with_error
from zeroxla.wire.hops import as_bits, from_bits
from zeroxla.wire.quantize import Backend, Wire
from zeroxla.wire.quantize_jit import dequant_reduce, dequant_sum, quantize
from zeroxla.wire.routes import Route


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One hop of a reduce that moves something."""

    axis: str
    length: int
    format: WireFormat | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reduces:
    """The reduces of one training setup; every method runs inside `shard_map`.

    Attributes:
      nodes: length of the axis `node`.
      devices: length of the axis `device`.
      dtype: in which gradients travel that are not quantized.
      stops_at_node: `reduce` leaves out the hop over `node`, which `over_nodes` makes later.
      backend: of the quantizer.
    """

    nodes: int
    devices: int
    dtype: jnp.dtype
    stops_at_node: bool = False
    backend: Backend | None = None

    def reduce(
        self, gradients: Sequence[jax.Array], routes: Sequence[Route], key: jax.Array | None = None
    ) -> list[jax.Array]:
        """Sum each leaf's gradient over all devices and keep this device's shard of it.

        Args:
          gradients: one per leaf, in its natural shape, any floating dtype.
          routes: of each leaf; all are split.
          key: where a format rounds stochastically.

        Returns:
          The shards of the sums, float32, in the shape that a device stores. With `stops_at_node`
          the pieces of 1/devices of a node's sums.

        Cost: each device receives (1 - 1/world) x the leaves in their wires.
        """
        stored = [
            r.placement.stored(g if any(r.gradients) else g.astype(self.dtype))
            for g, r in zip(gradients, routes, strict=True)
        ]
        axes = (DEVICE,) if self.stops_at_node else (DEVICE, NODE)
        return self._run(stored, routes, axes, key)

    def result_shape(self, placement: Placement) -> tuple[int, ...]:
        """Return the shape of what `reduce` makes of a leaf's gradient."""
        parts = self.devices if self.stops_at_node else self.nodes * self.devices
        return placement.part_shape(parts)

    def over_nodes(
        self, pieces: Sequence[jax.Array], routes: Sequence[Route], key: jax.Array | None = None
    ) -> list[jax.Array]:
        """Make the hop over `node` that `reduce` left out: pieces of sums -> shards of sums."""
        return self._run(pieces, routes, (NODE,), key)

    def over_nodes_with_feedback(
        self,
        piece: jax.Array,
        route: Route,
        error: jax.Array,
        feedback: Feedback,
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Make the hop over `node` of one leaf, adding what was lost on this hop in steps before.

        Args:
          piece: as for `over_nodes`.
          route: of the leaf; its hop over `node` is quantized.
          error: the wires of what was lost, uint8[nodes, bytes].
          feedback: how it is carried on.
          key: where the format rounds stochastically.

        Returns:
          The shard of the sum, and the error for the next step.
        """
        parcel, format = self._parcel(route), route.gradients[1]
        assert format is not None
        with jax.named_scope("reduce"):
            x_Rn = parcel.as_rows(piece)
            key = key_for(format, key)
            wires, error = quantize_with_error(feedback, x_Rn, error, format, key, self.backend)
            arrived = _exchange(wires, NODE, self.nodes)
            shard = dequant_sum(arrived, shape=(parcel.size,), backend=self.backend)
        return parcel.from_rows(shard), error

    def _run(
        self,
        arrays: Sequence[jax.Array],
        routes: Sequence[Route],
        axes: Sequence[str],
        key: jax.Array | None,
    ) -> list[jax.Array]:
        results: dict[int, jax.Array] = {}
        with jax.named_scope("reduce"):
            kinds = [r.gradients for r in routes]
            for i, b in enumerate(bundle([self._parcel(r) for r in routes], kinds)):
                legs = self._legs(axes, kinds[b.members[0]])
                if any(leg.format for leg in legs):
                    b = dataclasses.replace(b, fused=True)  # rows of shards, also of one leaf
                    mine = None if key is None else jax.random.fold_in(key, i)
                    x = self._quantized(b.pack(arrays), legs, mine)
                else:
                    x = b.pack(arrays)
                    for leg in legs:
                        x = self._reduce_scatter(x, b.dim, leg)
                found = b.unpack(x.astype(jnp.float32))
                if b.fused:
                    # Cut here, not in the optimizer's kernels: leaves of one shape share those.
                    found = lax.optimization_barrier(found)
                results.update(zip(b.members, found, strict=True))
        return [results[i] for i in range(len(routes))]

    def _legs(
        self, axes: Sequence[str], formats: tuple[WireFormat | None, WireFormat | None]
    ) -> list[Leg]:
        all_legs = (
            Leg(axis=DEVICE, length=self.devices, format=formats[0]),
            Leg(axis=NODE, length=self.nodes, format=formats[1]),
        )
        return [leg for leg in all_legs if leg.axis in axes and leg.length > 1]

    def _quantized(self, x_Rn: jax.Array, legs: Sequence[Leg], key: jax.Array | None) -> jax.Array:
        """Sum the rows over all legs; keep this device's: [R, n] -> float32[what is left, n]."""
        size = x_Rn.shape[1]
        wires = None  # of x_Rn, once it is quantized
        for i, (leg, after) in enumerate(zip(legs, [*legs[1:], None], strict=True)):
            mine = None if key is None else jax.random.fold_in(key, i)
            if leg.format is None:
                x_Rn = self._reduce_scatter(x_Rn, 0, leg)
                continue
            if wires is None:
                here = key_for(leg.format, mine)
                wires = quantize(x_Rn, format=leg.format, lead=1, key=here, backend=self.backend)
            arrived = _exchange(wires, leg.axis, leg.length)
            if after is not None and after.format is not None:
                then = key_for(after.format, mine)
                wires = dequant_reduce(arrived, format=after.format, key=then, backend=self.backend)
            else:
                wires, x_Rn = None, dequant_sum(arrived, shape=(size,), backend=self.backend)
        return x_Rn

    def _parcel(self, route: Route) -> Parcel:
        placement = route.placement
        shape = placement.part_shape(self.nodes * self.devices)
        return Parcel(shape=shape, dim=placement.split_dim)

    def _reduce_scatter(self, x: jax.Array, dim: int, leg: Leg) -> jax.Array:
        """One hop of floats: the float32 sum of the slice of `dim` at this device's index.

        In 16 bit the slices travel by all_to_all and are summed here in float32: each value is
        rounded once per hop, where a ring would round at every step.
        """
        x = x.astype(self.dtype)
        if self.dtype == jnp.float32:
            return lax.psum_scatter(x, leg.axis, scatter_dimension=dim, tiled=True)
        slices = x.reshape(
            *x.shape[:dim], leg.length, x.shape[dim] // leg.length, *x.shape[dim + 1 :]
        )
        received = lax.all_to_all(
            as_bits(slices), leg.axis, split_axis=dim, concat_axis=dim, tiled=True
        )
        return jnp.sum(from_bits(received, self.dtype), axis=dim, dtype=jnp.float32)


def _exchange(wires: Wire, axis: str, length: int) -> Wire:
    """Send each device of a hop its rows: wires [R] of here -> [L, R / L] of all L devices."""
    buffer = wires.buffer.reshape(length, -1, wires.buffer.shape[-1])
    buffer = lax.all_to_all(buffer, axis, split_axis=0, concat_axis=0, tiled=True)
    return dataclasses.replace(wires, buffer=buffer)
