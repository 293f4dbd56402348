"""Reduces the gradients of a unit to shards of their sum, hop after hop.

This is a gather's way back. The hop over `device` leaves each device with the sum of 1/devices of
the leaf, the hop over `node` leaves it with its shard. Sums are float32 on every hop. A quantized
gradient is cut into one wire for each shard. A hop exchanges the wires, dequantizes and sums them,
and the sum is quantized again for the next hop.

Shapes: L devices in a hop, R rows (shards) that a device still holds, n elements in a row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.mesh.placement import Placement
from zeroxla.program.random_keys import fold_in
from zeroxla.wire.bundles import ALONE_ELEMENTS, Bundle, Parcel, bundle
from zeroxla.wire.error_feedback import quantize_with_error
from zeroxla.wire.hops import FLOAT32, Hops, as_bits, from_bits
from zeroxla.wire.quantize import Backend
from zeroxla.wire.quantize_jit import dequant_reduce, dequant_sum, quantize
from zeroxla.wire.routes import Route
from zeroxla.wire.wire import Wire

JOINED_BYTES = 2**28
"""Wires up to so many bytes travel in one collective."""

Kind = tuple[WireFormat | None, WireFormat | None]
"""The formats of a gradient on the hops over `device` and `node`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceHop:
    """One hop of a reduce over more than one device.

    Attributes:
      axis: the mesh axis.
      length: length of the axis.
      format: the format in which gradients travel; None if they travel as floats.
    """

    axis: str
    length: int
    format: WireFormat | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reduces:
    """The reduces of one training setup; every method runs inside `shard_map`.

    Attributes:
      hops: the lengths of the mesh axes; a reduce makes one hop over each.
      dtype: wire dtype of gradients that are not quantized.
      stops_at_node: whether `reduce` leaves out the hop over `node`, which `over_nodes` makes
        later.
      backend: the quantizer's backend; see `quantize`.
      alone_elements: a shard of at least this many elements shares no buffer of floats with others.
    """

    hops: Hops
    dtype: jnp.dtype = FLOAT32
    stops_at_node: bool = False
    backend: Backend | None = None
    alone_elements: int = ALONE_ELEMENTS

    def reduce(
        self, gradients: Sequence[jax.Array], routes: Sequence[Route], key: jax.Array | None = None
    ) -> list[jax.Array]:
        """Sum each leaf's gradient over all devices and keep this device's shard of it.

        Args:
          gradients: one for each leaf, in its natural shape, of any floating dtype.
          routes: the leaves' routes. Every leaf is split.
          key: a PRNG key; None if no format rounds stochastically.

        Returns:
          The shards of the sums, float32, in the shapes that a device stores. With `stops_at_node`
          they are pieces, 1/devices of the sums over a node.

        Cost: each device receives (1 - 1/world) x the bytes of the gradients' wires.
        """
        stored = [
            r.placement.stored(g if any(r.gradients) else g.astype(self.dtype))
            for g, r in zip(gradients, routes, strict=True)
        ]
        axes = (DEVICE,) if self.stops_at_node else (DEVICE, NODE)
        return self._run(stored, routes, axes, key)

    def result_shape(self, placement: Placement) -> tuple[int, ...]:
        """Return the shape of a leaf's gradient after `reduce`."""
        parts = self.hops.devices if self.stops_at_node else self.hops.world
        return placement.part_shape(parts)

    def over_nodes(
        self, pieces: Sequence[jax.Array], routes: Sequence[Route], key: jax.Array | None = None
    ) -> list[jax.Array]:
        """Make the hop over `node` that `reduce` left out: turn pieces of sums into shards."""
        return self._run(pieces, routes, (NODE,), key)

    def over_nodes_with_feedback(
        self,
        piece: jax.Array,
        route: Route,
        error: jax.Array,
        feedback: Feedback,
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Make the hop over `node` for one leaf, and add the error of earlier steps on this hop.

        Args:
          piece: this device's piece of a node's sum, as `reduce` returned it.
          route: the leaf's route, whose hop over `node` is quantized.
          error: the kept error, uint8[nodes, bytes].
          feedback: the options of error feedback.
          key: a PRNG key; None if the format does not round stochastically.

        Returns:
          The shard of the sum, and the error for the next step.
        """
        parcel, format = self._parcel(route), route.gradients[1]
        assert format is not None
        with jax.named_scope("reduce"):
            x_Rn = parcel.as_rows(piece)
            key = key_for(format, key)
            wires, error = quantize_with_error(feedback, x_Rn, error, format, key, self.backend)
            (arrived,) = _exchange([wires], NODE, self.hops.nodes)
            shard = dequant_sum(arrived, shape=(parcel.size,), backend=self.backend)
        return parcel.from_rows(shard), error

    def _run(
        self,
        arrays: Sequence[jax.Array],
        routes: Sequence[Route],
        axes: Sequence[str],
        key: jax.Array | None,
    ) -> list[jax.Array]:
        """Make the hops over `axes`: with one collective for each bundle of leaves that travel as
        floats, and one for all wires of a kind."""
        results: dict[int, jax.Array] = {}
        with jax.named_scope("reduce"):
            parcels, kinds = [self._parcel(r) for r in routes], [r.gradients for r in routes]
            bundles = bundle(parcels, kinds, self.alone_elements)
            wired: dict[Kind, list[int]] = {}
            for i, b in enumerate(bundles):
                hops = self._hops(axes, kinds[b.members[0]])
                if any(hop.format for hop in hops):
                    wired.setdefault(kinds[b.members[0]], []).append(i)
                    continue
                x = b.pack(arrays)
                for hop in hops:
                    x = self._reduce_scatter(x, b.dim, hop)
                results.update(_members(b, x))
            for kind, numbers in wired.items():
                # One row for each shard, also of a leaf that is alone.
                mine = [dataclasses.replace(bundles[i], fused=True) for i in numbers]
                rows = [b.pack(arrays) for b in mine]
                keys = [fold_in(key, i) for i in numbers]
                sums = self._quantized(rows, self._hops(axes, kind), keys)
                for b, x in zip(mine, sums, strict=True):
                    results.update(_members(b, x))
        return [results[i] for i in range(len(routes))]

    def _hops(
        self, axes: Sequence[str], formats: tuple[WireFormat | None, WireFormat | None]
    ) -> list[ReduceHop]:
        """Return the hops over `axes`, without those over an axis of one device."""
        both = (
            ReduceHop(axis=DEVICE, length=self.hops.devices, format=formats[0]),
            ReduceHop(axis=NODE, length=self.hops.nodes, format=formats[1]),
        )
        return [hop for hop in both if hop.axis in axes and hop.length > 1]

    def _quantized(
        self, rows: list[jax.Array], hops: Sequence[ReduceHop], keys: Sequence[jax.Array | None]
    ) -> list[jax.Array]:
        """Sum the rows of each bundle over all hops.

        Args:
          rows: [R, n] for each bundle, with the same R and its own n.
          hops: the hops, one of them with a format.
          keys: a key for each bundle; None if no format rounds stochastically.

        Returns:
          The rows that stay here: float32[rows, n] for each bundle.
        """
        sizes = [x.shape[1] for x in rows]
        wires = None  # the wires of `rows`, once they are quantized
        for i, (hop, after) in enumerate(zip(hops, [*hops[1:], None], strict=True)):
            mine = [fold_in(key, i) for key in keys]
            if hop.format is None:
                rows = [self._reduce_scatter(x, 0, hop) for x in rows]
                continue
            if wires is None:
                wires = [self._wires(x, hop.format, key) for x, key in zip(rows, mine, strict=True)]
            arrived = _exchange(wires, hop.axis, hop.length)
            if after is not None and after.format is not None:
                wires = [
                    dequant_reduce(
                        wire,
                        format=after.format,
                        key=key_for(after.format, key),
                        backend=self.backend,
                    )
                    for wire, key in zip(arrived, mine, strict=True)
                ]
            else:
                wires, rows = (
                    None,
                    [
                        dequant_sum(wire, shape=(size,), backend=self.backend)
                        for wire, size in zip(arrived, sizes, strict=True)
                    ],
                )
        return rows

    def _wires(self, x_Rn: jax.Array, format: WireFormat, key: jax.Array | None) -> Wire:
        key = key_for(format, key)
        return quantize(x_Rn, format=format, lead=1, key=key, backend=self.backend)

    def _parcel(self, route: Route) -> Parcel:
        """Return the shape of a shard's gradient, as a collective sees it."""
        placement = route.placement
        return Parcel(shape=placement.part_shape(self.hops.world), dim=placement.split_dim)

    def _reduce_scatter(self, x: jax.Array, dim: int, hop: ReduceHop) -> jax.Array:
        """Make one hop with floats: return the float32 sum of this device's slice along `dim`.

        16-bit slices travel by all_to_all and are summed here in float32. Each value is then
        rounded once in a hop, where a ring would round it at every step.
        """
        x = x.astype(self.dtype)
        if self.dtype == jnp.float32:
            return lax.psum_scatter(x, hop.axis, scatter_dimension=dim, tiled=True)
        slices = x.reshape(
            *x.shape[:dim], hop.length, x.shape[dim] // hop.length, *x.shape[dim + 1 :]
        )
        received = lax.all_to_all(
            as_bits(slices), hop.axis, split_axis=dim, concat_axis=dim, tiled=True
        )
        return jnp.sum(from_bits(received, self.dtype), axis=dim, dtype=jnp.float32)


def _members(b: Bundle, x: jax.Array) -> Iterable[tuple[int, jax.Array]]:
    """Return the shards in a bundle after its collectives, with their positions in the unit."""
    found = b.unpack(x.astype(jnp.float32))
    if b.fused:
        # The buffer is cut here. Cut inside the optimizer's kernels, each leaf would need a kernel
        # of its own, where leaves of one shape now share one.
        found = lax.optimization_barrier(found)
    return zip(b.members, found, strict=True)


def _exchange(wires: Sequence[Wire], axis: str, length: int) -> list[Wire]:
    """Send each device of a hop its rows: turn this device's [R] wires into [L, R / L] wires, R / L
    from each of the L devices.

    The wires of several bundles travel end to end in one collective, up to JOINED_BYTES of them. To
    join and cut them moves bytes, a quarter or an eighth of those of the gradients.
    """
    groups: list[list[Wire]] = []
    room = 0
    for wire in wires:
        if wire.buffer.size > room:
            groups.append([])
            room = JOINED_BYTES
        groups[-1].append(wire)
        room -= wire.buffer.size
    arrived = []
    for group in groups:
        parts = [wire.buffer.reshape(length, -1, wire.buffer.shape[-1]) for wire in group]
        buffer = jnp.concatenate(parts, axis=2)
        buffer = lax.all_to_all(buffer, axis, split_axis=0, concat_axis=0, tiled=True)
        ends = list(itertools.accumulate(part.shape[2] for part in parts))
        for wire, part, end in zip(group, parts, ends, strict=True):
            mine = lax.slice_in_dim(buffer, end - part.shape[2], end, axis=2)
            arrived.append(dataclasses.replace(wire, buffer=mine))
    return arrived
