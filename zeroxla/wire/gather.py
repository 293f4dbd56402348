"""Gathers the leaves of a unit, hop after hop, with one collective for each hop and wire dtype.

The law is gathered = post(all_gather(pre(shard))). `pre` turns a shard into its form on the wire:
the bits of its floats, or the bytes of a quantized wire. `post` turns the gathered form into the
leaf. A shard is quantized once, by the device that stores it, and its wire passes all hops
unchanged.

A leaf with a kept copy sends its difference to the copy over the outer hops instead. The new copy
is its secondary shard. If that travels on in a format, it may be quantized once and kept beside the
copy, so that backward need not quantize it again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.offload.disk.desk import Desk
from zeroxla.program.phases import unit_scope
from zeroxla.wire.bundles import ALONE_ELEMENTS, Bundle, bundle
from zeroxla.wire.encodings import Encoding
from zeroxla.wire.hops import FLOAT32, Hops, run_gather
from zeroxla.wire.quantize import Backend
from zeroxla.wire.routes import Form, LeafSource, Route

Keys = Sequence[jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrivingUnit:
    """A unit that has been gathered and is not yet cut into leaves.

    A tie to a gather must go through these buffers. A tie through a leaf that is cut from a buffer
    would copy the leaf, and XLA removes from a barrier any value that nothing else reads, such as a
    second view of the buffer.

    Attributes:
      buffers: the results of the collectives.
      bundles: the leaves in each buffer.
      encodings: the form of each leaf in its buffer.
      secondary: the secondary shards to keep, new copies among them, by the leaf's position in the
        unit.
    """

    buffers: list[jax.Array]
    bundles: list[Bundle]
    encodings: list[Encoding]
    secondary: dict[int, LeafSource]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gathers:
    """The gathers of one training setup; every method runs inside `shard_map`.

    Attributes:
      hops: the hops of a gather on this mesh, of leaves that no axis splits further.
      compute_dtype: dtype of gathered leaves.
      wire_dtype: wire dtype of leaves that are not quantized.
      backend: the quantizer's backend; see `quantize`.
      secondary_on_host: whether secondary shards are kept in the host's memory.
      desk: reads shards on disk; None if no state is on disk.
      alone_elements: a shard of at least this many elements shares no buffer with others.
    """

    hops: Hops
    compute_dtype: jnp.dtype = FLOAT32
    wire_dtype: jnp.dtype = FLOAT32
    backend: Backend | None = None
    secondary_on_host: bool = False
    desk: Desk | None = None
    alone_elements: int = ALONE_ELEMENTS

    def gather(
        self, sources: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> list[jax.Array]:
        """Gather the leaves of a unit.

        Args:
          sources: this device's part of each leaf.
          routes: the leaves' routes. Every leaf is split.
          keys: a PRNG key for each leaf whose format rounds stochastically, None for the others.

        Returns:
          Each leaf whole, in its natural shape and the compute dtype; uint8 if it is a wire.

        Cost: each device receives (1 - 1/world) x the bytes of the leaves' wires, padding included.
        From other hosts, each byte reaches a host once. A secondary shard passes the inner hops
        only.
        """
        return self.finish(self.start(sources, routes, keys), routes)

    def start(
        self, sources: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> ArrivingUnit:
        """Run the collectives of `gather`, and keep secondary shards on the way."""
        with jax.named_scope(unit_scope(route.name for route in routes)):
            new = self._new_copies(sources, routes, keys)
            sources = [new.get(i, s) for i, s in enumerate(sources)]
            arriving = self._run(sources, routes, keys, to_leaf=True)
        return dataclasses.replace(arriving, secondary={**new, **arriving.secondary})

    def finish(self, arriving: ArrivingUnit, routes: Sequence[Route]) -> list[jax.Array]:
        """Cut the buffers into leaves, and decode them."""
        leaves: dict[int, jax.Array] = {}
        with jax.named_scope(unit_scope(r.name for r in routes)), jax.named_scope("gather"):
            for b, buffer in zip(arriving.bundles, arriving.buffers, strict=True):
                for i, x in zip(b.members, b.unpack(buffer), strict=True):
                    dtype = x.dtype if routes[i].is_wire else self.compute_dtype
                    stored = arriving.encodings[i].decode(x, dtype)
                    leaves[i] = routes[i].placement.natural(stored)
        return [leaves[i] for i in range(len(routes))]

    def secondary(
        self, shards: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> list[LeafSource]:
        """Run the outer hops only, and return the secondary shard of each leaf, with its new copy
        if one is kept.

        Cost: each device receives (1 - hpz_size/world) / hpz_size x the bytes of the leaves' wires.
        """
        found = self._new_copies(shards, routes, keys)
        rest = [i for i in range(len(routes)) if i not in found]
        keys = None if keys is None else [keys[i] for i in rest]
        run = self._run([shards[i] for i in rest], [routes[i] for i in rest], keys, to_leaf=False)
        found.update((rest[at], x) for at, x in run.secondary.items())
        return [found[i] for i in range(len(routes))]

    def on_device(self, source: LeafSource, route: Route) -> LeafSource:
        """Bring a source into device memory, from the host or from disk."""
        if source.form != "ticket":
            return source.on_device()
        assert self.desk is not None, "a ticket without a desk"
        hops = self._hops(route)
        shape = route.placement.part_shape(hops.world)
        shard = self.desk.redeem(source.array, shape, hops.shard_index())
        return dataclasses.replace(source, array=shard, form="shard")

    @jax.named_scope("gather")
    def _new_copies(
        self, sources: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None
    ) -> dict[int, LeafSource]:
        """Bring the copies of those shards that have one up to date; return the secondary shards
        that they are, by position.

        The rounding errors of a copy and of its difference are part of the next difference, so they
        do not add up.
        """
        copies = {i: s.copy for i, s in enumerate(sources) if s.is_shard and s.copy is not None}
        if not copies:
            return {}
        differences, ways = [], []
        for i, copy in copies.items():
            shard, dim = self.on_device(sources[i], routes[i]).array, routes[i].placement.split_dim
            size = shard.shape[dim]
            first = self._hops(routes[i]).outer_index() * size
            known = lax.dynamic_slice_in_dim(copy, first, size, axis=dim)
            differences.append(shard - known.astype(jnp.float32))
            ways.append(routes[i].of_differences())
        exact = dataclasses.replace(self, compute_dtype=FLOAT32)
        mine = [sources[i].key for i in copies]
        sources = [LeafSource(x) for x in differences]
        found = exact._run(sources, ways, mine, to_leaf=False).secondary
        new = {}
        for at, (i, copy) in enumerate(copies.items()):
            values = (copy.astype(jnp.float32) + found[at].array).astype(copy.dtype)
            new[i] = LeafSource(values, "values", copy=values)
            if routes[i].keeps_coded:
                encoding = self._encoding(routes[i], "values")
                wire = encoding.encode(values, None if keys is None else keys[i])
                new[i] = LeafSource(wire, "coded", copy=values)
        return new

    @jax.named_scope("gather")
    def _run(
        self,
        sources: Sequence[LeafSource],
        routes: Sequence[Route],
        keys: Keys | None,
        *,
        to_leaf: bool,
    ) -> ArrivingUnit:
        """Run the outer hops for sources that are still shards, then the inner hops for all, if the
        leaves are to be whole."""
        keys = [None] * len(sources) if keys is None else keys
        sources = [self.on_device(s, r) for s, r in zip(sources, routes, strict=True)]
        encodings = [self._encoding(r, s.form) for s, r in zip(sources, routes, strict=True)]
        arrays = [
            s.array if s.is_encoded else e.encode(s.array, key if s.key is None else s.key)
            for s, e, key in zip(sources, encodings, keys, strict=True)
        ]
        at_shard = [s.is_shard for s in sources]
        parcels = [e.parcel for e in encodings]
        # A secondary shard is one row here if it is kept as values, and several if kept as wires.
        all_hops = [self._hops(route) for route in routes]
        kinds = [
            (first, x.dtype, p.num_rows(x), hops.inside)
            for first, x, p, hops in zip(at_shard, arrays, parcels, all_hops, strict=True)
        ]
        bundles = bundle(parcels, kinds, self.alone_elements)
        buffers, secondary = [], {}
        for b in bundles:
            x, hops = b.pack(arrays), all_hops[b.members[0]]
            if at_shard[b.members[0]]:
                x = run_gather(x, b.dim, hops.outer)
                kept = [i for i in b.members if routes[i].secondary]
                parts = dict(zip(b.members, b.unpack(x), strict=True)) if kept else {}
                for i in kept:
                    secondary[i] = self._secondary_shard(parts[i], encodings[i], routes[i])
            buffers.append(run_gather(x, b.dim, hops.inner if to_leaf else ()))
        return ArrivingUnit(
            buffers=buffers, bundles=bundles, encodings=encodings, secondary=secondary
        )

    def secondary_bytes(self, route: Route) -> int:
        """Return the bytes of a leaf's secondary shard on one device; 0 if none is kept."""
        if route.secondary is None:
            return 0
        encoding, hops = self._encoding(route, "shard"), self._hops(route)
        values = math.prod(route.placement.part_shape(hops.hpz_size))
        values *= self.compute_dtype.itemsize
        if route.differences is not None:
            coded = self._encoding(route, "coded").parcel.size if route.keeps_coded else 0
            return values + coded
        if route.weights is not None and route.secondary == "values":
            return values
        itemsize = encoding.dtype.itemsize if encoding.format is None else 1
        return hops.num_outer * encoding.parcel.size * itemsize

    def _hops(self, route: Route) -> Hops:
        """Return the hops of a leaf."""
        return self.hops.over(route.placement.axes)

    def _encoding(self, route: Route, form: Form) -> Encoding:
        """Return the form in which a leaf travels from a source of a form."""
        placement, hops = route.placement, self._hops(route)
        shape = placement.part_shape(hops.world)
        format = route.weights
        dtype = jnp.dtype(jnp.uint8) if route.is_wire else self.wire_dtype
        if form in ("values", "coded"):
            format, dtype = route.values, self.compute_dtype
            shape = placement.part_shape(hops.hpz_size) if format else shape
        return Encoding(
            shape=shape,
            split_dim=placement.split_dim,
            layer_dims=placement.layer_dims,
            format=format,
            dtype=dtype,
            backend=self.backend,
        )

    def _secondary_shard(self, parts: jax.Array, encoding: Encoding, route: Route) -> LeafSource:
        """Return the secondary shard to keep, from its parts as they travel."""
        if encoding.format is None or route.secondary == "wire":
            kept = LeafSource(parts, "wire")
        else:
            kept = LeafSource(encoding.decode(parts, self.compute_dtype), "values")
        return kept.on_host() if self.secondary_on_host else kept
