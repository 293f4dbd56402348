"""Reduces the gradients of a unit to shards of their sum, hop after hop.

This is a gather's way back. The hop over `device` leaves each device with the sum of 1/devices of
the leaf, the hop over `node` leaves it with its shard. Sums are float32 on every hop. A quantized
gradient is cut into one wire for each shard. A hop exchanges the wires, dequantizes and sums them,
and the sum is quantized again for the next hop.

Shapes: R rows (shards) that a device still holds, n elements in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.mesh.placement import Placement
from zeroxla.program.phases import unit_scope
from zeroxla.program.random_keys import fold_in
from zeroxla.wire.bundles import ALONE_ELEMENTS, Bundle, Parcel, bundle
from zeroxla.wire.error_feedback import quantize_with_error
from zeroxla.wire.exchange import exchange
from zeroxla.wire.hops import FLOAT32, Hops
from zeroxla.wire.quantize import Backend
from zeroxla.wire.quantize_jit import dequant_sum
from zeroxla.wire.reduce_hops import ReduceHop, sum_wires, wires_of_last_hop
from zeroxla.wire.routes import Route
from zeroxla.wire.wire import Wire

Kind = tuple[tuple[str, ...], WireFormat | None, WireFormat | None]
"""The axes over which a leaf is split, and the formats of its gradient on the hops over `device`
(with other axes inside a node) and `node`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StartedReduce:
    """The reduce of a unit before the last of its hops that sends wires. A loop can carry it.

    Attributes:
      shards: the shards that are complete, as these leaves travel as floats, by position in the
        unit.
      wires: for each kind of gradient that travels as wires, the wires of its bundles for the last
        hop that sends wires.
    """

    shards: dict[int, jax.Array]
    wires: list[list[Wire]]

    @property
    def arrays(self) -> list[jax.Array]:
        """The arrays that exist once the unit's whole gradients need not."""
        return [*self.shards.values(), *(w.buffer for mine in self.wires for w in mine)]


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
        return self.finish(self.start(gradients, routes, key), routes)

    def start(
        self, gradients: Sequence[jax.Array], routes: Sequence[Route], key: jax.Array | None = None
    ) -> StartedReduce:
        """Begin `reduce`, with the same arguments: make all hops before the last one that sends
        wires, which `finish` makes."""
        stored = [
            r.placement.stored(g if any(r.gradients) else g.astype(self.dtype))
            for g, r in zip(gradients, routes, strict=True)
        ]
        return self._start(stored, routes, self._axes, key)

    def finish(self, started: StartedReduce, routes: Sequence[Route]) -> list[jax.Array]:
        """Make the hops that `start` left; return what `reduce` returns."""
        return self._finish(started, routes, self._axes)

    def sends_wires(self, route: Route) -> bool:
        """Return whether `reduce` sends the gradient of a leaf as wires on one of its hops."""
        return any(hop.format for hop in self._hops(self._axes, _kind(route)))

    @property
    def _axes(self) -> tuple[str, ...]:
        """The axes of the hops that `reduce` makes."""
        return (DEVICE,) if self.stops_at_node else (DEVICE, NODE)

    def result_shape(self, placement: Placement) -> tuple[int, ...]:
        """Return the shape of a leaf's gradient after `reduce`."""
        hops = self.hops.over(placement.axes)
        parts = hops.devices if self.stops_at_node else hops.world
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
            (arrived,) = exchange([wires], NODE, self.hops.nodes)
            shard = dequant_sum(arrived, shape=(parcel.size,), backend=self.backend)
        return parcel.from_rows(shard), error

    def _run(
        self,
        arrays: Sequence[jax.Array],
        routes: Sequence[Route],
        axes: Sequence[str],
        key: jax.Array | None,
    ) -> list[jax.Array]:
        """Make the hops over `axes`."""
        return self._finish(self._start(arrays, routes, axes, key), routes, axes)

    def _start(
        self,
        arrays: Sequence[jax.Array],
        routes: Sequence[Route],
        axes: Sequence[str],
        key: jax.Array | None,
    ) -> StartedReduce:
        """Make all hops of the leaves that travel as floats, with one collective for each bundle
        and hop. Of the others make all hops before the last one that sends wires, with one
        collective for all wires of a kind and hop."""
        started = StartedReduce({}, [])
        with jax.named_scope(unit_scope(r.name for r in routes)), jax.named_scope("reduce"):
            floats, wired = self._bundles(routes, axes)
            for b in floats:
                x = b.pack(arrays)
                for hop in self._hops(axes, _kind(routes[b.members[0]])):
                    x = hop.sum_floats(x, b.dim, self.dtype)
                started.shards.update(_members(b, x))
            for kind, numbered in wired.items():
                rows = [b.pack(arrays) for _, b in numbered]
                keys = [fold_in(key, i) for i, _ in numbered]
                started.wires.append(
                    wires_of_last_hop(rows, self._hops(axes, kind), keys, self.dtype, self.backend)
                )
        return started

    def _finish(
        self, started: StartedReduce, routes: Sequence[Route], axes: Sequence[str]
    ) -> list[jax.Array]:
        """Make the hops that `_start` left."""
        results = dict(started.shards)
        with jax.named_scope(unit_scope(r.name for r in routes)), jax.named_scope("reduce"):
            _, wired = self._bundles(routes, axes)
            for (kind, numbered), wires in zip(wired.items(), started.wires, strict=True):
                sums = sum_wires(wires, self._hops(axes, kind), self.dtype, self.backend)
                for (_, b), x in zip(numbered, sums, strict=True):
                    results.update(_members(b, x))
        return [results[i] for i in range(len(routes))]

    def _bundles(
        self, routes: Sequence[Route], axes: Sequence[str]
    ) -> tuple[list[Bundle], dict[Kind, list[tuple[int, Bundle]]]]:
        """Return the bundles that travel as floats, and by kind those that travel as wires, with
        their numbers."""
        kinds = [_kind(r) for r in routes]
        bundles = bundle([self._parcel(r) for r in routes], kinds, self.alone_elements)
        floats: list[Bundle] = []
        wired: dict[Kind, list[tuple[int, Bundle]]] = {}
        for i, b in enumerate(bundles):
            kind = kinds[b.members[0]]
            if any(hop.format for hop in self._hops(axes, kind)):
                # One row for each shard, also of a leaf that is alone.
                wired.setdefault(kind, []).append((i, dataclasses.replace(b, fused=True)))
            else:
                floats.append(b)
        return floats, wired

    def _hops(self, axes: Sequence[str], kind: Kind) -> list[ReduceHop]:
        """Return the hops over `axes`, without those over an axis of one device. With `device` go
        the other axes inside a node over which the leaf is split."""
        split_over, *formats = kind
        hops = self.hops.over(split_over)
        found = []
        if DEVICE in axes:
            found.append(ReduceHop(axis=hops.device_axis, length=hops.devices, format=formats[0]))
        if NODE in axes:
            found.append(ReduceHop(axis=NODE, length=hops.nodes, format=formats[1]))
        return [hop for hop in found if hop.length > 1]

    def _parcel(self, route: Route) -> Parcel:
        """Return the shape of a shard's gradient, as a collective sees it."""
        placement = route.placement
        world = self.hops.over(placement.axes).world
        return Parcel(shape=placement.part_shape(world), dim=placement.split_dim)


def _kind(route: Route) -> Kind:
    """Return what decides which hops a leaf's gradient makes, and how."""
    return (route.placement.axes, *route.gradients)


def _members(b: Bundle, x: jax.Array) -> Iterable[tuple[int, jax.Array]]:
    """Return the shards in a bundle after its collectives, with their positions in the unit."""
    found = b.unpack(x.astype(jnp.float32))
    if b.fused:
        # The buffer is cut here. Cut inside the optimizer's kernels, each leaf would need a kernel
        # of its own, where leaves of one shape now share one.
        found = lax.optimization_barrier(found)
    return zip(b.members, found, strict=True)
