"""Gathering the leaves of a unit, hop after hop, one collective per hop and wire dtype.

The law: gathered = post(all_gather(pre(shard))). `pre` turns a shard into what travels, the bits of
a float or the bytes of a quantized wire; `post` turns what arrived into the leaf. A shard is
quantized once, by the device that stores it, and its wire passes all hops as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from zeroxla.offload.disk.desk import Desk
from zeroxla.wire.bundles import Bundle, bundle
from zeroxla.wire.encodings import Encoding
from zeroxla.wire.hops import Hop, Hops, run_gather
from zeroxla.wire.quantize import Backend
from zeroxla.wire.routes import Form, LeafSource, Route

Keys = Sequence[jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrivingUnit:
    """A unit on its way: its buffers, not yet cut into leaves.

    A tie to a gather needs the buffers themselves: a tie to a leaf would copy one that is cut from
    a buffer, and XLA drops from a barrier what nothing else reads, such as another view of it.

    Attributes:
      buffers: what the collectives gave.
      bundles: what is in each.
      encodings: of each leaf.
      secondary: the secondary shards to keep, by position in the unit.
    """

    buffers: list[jax.Array]
    bundles: list[Bundle]
    encodings: list[Encoding]
    secondary: dict[int, LeafSource]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gathers:
    """The gathers of one training setup; every method runs inside `shard_map`.

    Attributes:
      hops: of the mesh.
      wire_dtype: dtype in which leaves travel that are not quantized.
      compute_dtype: dtype of gathered leaves.
      backend: of the quantizer.
      secondary_on_host: secondary shards are kept in the host's memory.
      desk: that reads shards on disk; None where there are none.
    """

    hops: Hops
    wire_dtype: jnp.dtype
    compute_dtype: jnp.dtype
    backend: Backend | None = None
    secondary_on_host: bool = False
    desk: Desk | None = None

    def gather(
        self, sources: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> list[jax.Array]:
        """Gather the leaves of a unit.

        Args:
          sources: what this device holds of each leaf.
          routes: of each leaf; all are split.
          keys: for each leaf, where its format rounds stochastically.

        Returns:
          Each leaf whole, in its natural shape and the compute dtype; uint8 if it is a wire.

        Cost: each device receives (1 - 1/world) x the leaves' wires, padding included; a host
        receives that of its share between hosts, once. A secondary shard passes the inner hops
        only.
        """
        return self.finish(self.start(sources, routes, keys), routes)

    def start(
        self, sources: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> ArrivingUnit:
        """Run the collectives of `gather`, and take the secondary shards on the way."""
        return self._run(sources, routes, keys, self.hops.inner)

    def finish(self, arriving: ArrivingUnit, routes: Sequence[Route]) -> list[jax.Array]:
        """Return the leaves that are in the buffers."""
        leaves: dict[int, jax.Array] = {}
        with jax.named_scope("gather"):
            for b, buffer in zip(arriving.bundles, arriving.buffers, strict=True):
                for i, x in zip(b.members, b.unpack(buffer), strict=True):
                    dtype = x.dtype if routes[i].is_wire else self.compute_dtype
                    stored = arriving.encodings[i].decode(x, dtype)
                    leaves[i] = routes[i].placement.natural(stored)
        return [leaves[i] for i in range(len(routes))]

    def secondary(
        self, shards: Sequence[LeafSource], routes: Sequence[Route], keys: Keys | None = None
    ) -> list[LeafSource]:
        """Run the outer hops only: return the secondary shard of each leaf.

        Cost: each device receives (1 - hpz_size/world) / hpz_size x the leaves' wires.
        """
        found = self._run(shards, routes, keys, ()).secondary
        return [found[i] for i in range(len(routes))]

    def on_device(self, source: LeafSource, route: Route) -> LeafSource:
        """Return a source in device memory, read if it is on disk."""
        if source.form != "ticket":
            return source.on_device()
        assert self.desk is not None, "a ticket without a desk"
        shape = route.placement.part_shape(self.hops.world)
        return LeafSource(self.desk.redeem(source.array, shape, self.hops.shard_index()))

    @jax.named_scope("gather")
    def _run(
        self,
        sources: Sequence[LeafSource],
        routes: Sequence[Route],
        keys: Keys | None,
        inner: tuple[Hop, ...],
    ) -> ArrivingUnit:
        """Run the outer hops where there is a shard, and then `inner`."""
        keys = [None] * len(sources) if keys is None else keys
        sources = [self.on_device(s, r) for s, r in zip(sources, routes, strict=True)]
        encodings = [
            self._encoding(r, s.form, s.array.shape) for s, r in zip(sources, routes, strict=True)
        ]
        arrays = [
            s.array if s.form == "wire" else e.encode(s.array, key)
            for s, e, key in zip(sources, encodings, keys, strict=True)
        ]
        at_shard = [s.is_shard for s in sources]
        parcels = [e.parcel for e in encodings]
        # A secondary shard of values is one row on its way, one of stored wires several.
        kinds = [
            (first, x.dtype, p.num_rows(x))
            for first, x, p in zip(at_shard, arrays, parcels, strict=True)
        ]
        bundles = bundle(parcels, kinds)
        buffers, secondary = [], {}
        for b in bundles:
            x = b.pack(arrays)
            if at_shard[b.members[0]]:
                x = run_gather(x, b.dim, self.hops.outer)
                kept = [i for i in b.members if routes[i].secondary]
                parts = dict(zip(b.members, b.unpack(x), strict=True)) if kept else {}
                for i in kept:
                    secondary[i] = self._kept(parts[i], encodings[i], routes[i])
            buffers.append(run_gather(x, b.dim, inner))
        return ArrivingUnit(
            buffers=buffers, bundles=bundles, encodings=encodings, secondary=secondary
        )

    def secondary_bytes(self, route: Route) -> int:
        """Return the bytes of a leaf's secondary shard on one device; 0 if none is kept."""
        if route.secondary is None:
            return 0
        in_values = route.weights is not None and route.secondary == "values"
        encoding = self._encoding(route, "shard")
        if in_values:
            encoding = dataclasses.replace(encoding, format=None, dtype=self.compute_dtype)
        itemsize = encoding.dtype.itemsize if encoding.format is None else 1
        return self.hops.num_outer * encoding.parcel.size * itemsize

    def _encoding(self, route: Route, form: Form, array: tuple[int, ...] = ()) -> Encoding:
        """Return how a leaf travels from a source of that form and the shape `array`."""
        placement = route.placement
        shape = placement.part_shape(self.hops.world)
        format = route.weights
        dtype = jnp.dtype(jnp.uint8) if route.is_wire else self.wire_dtype
        if form == "values":
            format, dtype = route.values, self.compute_dtype
            shape = array if format else shape
        return Encoding(
            shape=shape,
            split_dim=placement.split_dim,
            layer_dims=placement.layer_dims,
            format=format,
            dtype=dtype,
            backend=self.backend,
        )

    def _kept(self, parts: jax.Array, encoding: Encoding, route: Route) -> LeafSource:
        if encoding.format is None or route.secondary == "wire":
            kept = LeafSource(parts, "wire")
        else:
            kept = LeafSource(encoding.decode(parts, self.compute_dtype), "values")
        return kept.on_host() if self.secondary_on_host else kept
