"""The order of gathers: each starts at the entry of the segment that its tie point names.

With prefetch, each gather is also tied to the results of the gather before it. Otherwise XLA
combines the next unit's gather with the gather of the unit after it. The second one may start only
later, so both come late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from zeroxla.fetch.segments import LayerLoop, Segment, Straight
from zeroxla.fetch.ties import tie
from zeroxla.offload.memory_kinds import is_on_host
from zeroxla.program.trace import Value
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.gather import ArrivingUnit
from zeroxla.wire.routes import LeafSource, Route


def tie_points(
    sizes: Sequence[int],
    budget: int | None,
    *,
    loops: Collection[int] = (),
    in_loop: bool = False,
) -> list[int]:
    """Return for each segment the earliest segment at whose entry its gather may start.

    At that entry at most `budget` elements are gathered ahead, the segment's own included. No
    gather runs ahead of a whole loop: nothing else runs beside a loop, and the unit would be alive
    through all its turns.

    Args:
      sizes: the number of elements that each segment gathers, in the order in which segments run.
      budget: see `ZeroConfig.prefetch_bucket`. None means one segment ahead.
      loops: the indices of segments that are loops.
      in_loop: whether the segments are the body of a loop. Its first unit may then be gathered in
        the turn before, which is segment -1.
    """
    first = next((i for i, size in enumerate(sizes) if size), None)
    points = []
    for i, size in enumerate(sizes):
        least = max([-1 if in_loop and i == first else 0, *(j + 1 for j in loops if j < i)])
        j, ahead = i, size
        if budget is None:
            j = least if i == first else max(i - 1, least)
        while budget and j > least and 0 < ahead <= budget:
            j -= 1
            ahead += sizes[j]
        points.append(j)
    return points


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchOrder:
    """The order of the gathers in one pass over a plan's segments, forward or backward.

    Attributes (all but `chained` have one entry per segment, in the order of the pass):
      units: the leaves that the segment uses whole.
      stacked: the stacked leaves of a loop, which its body gathers; () for other segments. The
        gather of the first turn may stand before the loop, so these shards are tied too.
      keeps: the leaves of the segment that stay whole for a later use.
      points: the segments at whose entry the gathers start, from `tie_points`.
      chained: whether each gather is tied to the one before it.
    """

    units: Sequence[Sequence[Value]]
    stacked: Sequence[Sequence[Value]]
    keeps: Sequence[Collection[Value]]
    points: Sequence[int]
    chained: bool

    @classmethod
    def make(
        cls,
        segments: Sequence[Segment],
        units: Sequence[Sequence[Value]],
        keeps: Sequence[Collection[Value]],
        budget: int | None,
        *,
        in_loop: bool,
    ) -> FetchOrder:
        """Order the gathers of a pass over `segments`; see `tie_points`."""
        prefetches = budget != 0
        first_inside = [
            () if isinstance(s, Straight) else next(iter(s.body.units), ()) for s in segments
        ]
        sizes = [
            sum(leaf.aval.size for leaf in (*unit, *first))
            for unit, first in zip(units, first_inside, strict=True)
        ]
        loops = [i for i, s in enumerate(segments) if isinstance(s, LayerLoop)]
        return cls(
            units=units,
            # Without prefetch no loop gathers before its first turn.
            stacked=[stacked_leaves(s) if prefetches else () for s in segments],
            keeps=keeps,
            points=tie_points(sizes, budget, loops=loops, in_loop=in_loop and prefetches),
            chained=prefetches,
        )


class Fetches:
    """The gathers of one pass, while it runs.

    Call `enter` and then `take` for each segment, in order.

    Args:
      order: the order of the gathers.
      collectives: the collectives of the mesh.
      routes: the route of each leaf.
      sources: the piece of each leaf that this device holds.
      live: the leaves that are whole when the pass begins.
      key: the key of stochastic rounding; None if no format rounds stochastically.

    Attributes:
      sources: the given sources, tied. Loops and remat bodies must read these. A leaf that has been
        gathered has its secondary shard here, if it keeps one.
      live: the leaves that are whole now.
    """

    def __init__(
        self,
        order: FetchOrder,
        collectives: Collectives,
        routes: Mapping[Value, Route],
        sources: Mapping[Value, LeafSource],
        live: Mapping[Value, jax.Array],
        key: jax.Array | None,
    ) -> None:
        self.order, self.gathers, self.routes = order, collectives.gathers, routes
        self._by_data = collectives.ties_by_data
        self.sources, self.live = dict(sources), dict(live)
        self._missing = missing_leaves(order, self.live)
        self._keys = _keys(sources, key)
        self._arrived: list[jax.Array] = []  # the results of the last gather
        self._arriving: dict[int, ArrivingUnit] = {}  # not yet cut into leaves
        self.enter(-1, [])

    def enter(self, point: int, entry: Sequence[Any]) -> list[Any]:
        """Start the gathers that may start at the entry of segment `point`.

        Args:
          point: the position of the segment in the pass.
          entry: the arrays that the segment reads and no gather may run ahead of. An entry may be
            None; it stays None.

        Returns:
          `entry`, tied. The segment must read these arrays.
        """
        entry = list(entry)
        for i, start in enumerate(self.order.points):
            missing = self._missing[i]
            leaves = (*missing, *self.order.stacked[i])
            if start != point or not leaves:
                continue
            parts = [self.sources[v] for v in leaves]
            to = [*entry, *self._arrived]
            tied, after = tie([x.array for x in parts], to, by_data=self._by_data)
            entry = after[: len(entry)]
            for v, x, part in zip(leaves, tied, parts, strict=True):
                self.sources[v] = dataclasses.replace(part, array=x)
            coming = [self.gathers.on_device(self.sources[v], self.routes[v]) for v in missing]
            if self._by_data and any(is_on_host(self.sources[v].array) for v in missing):
                # The arrays above are in host memory, and so were tied by a barrier alone.
                here, after = tie([x.array for x in coming], after, by_data=True)
                entry = after[: len(entry)]
                coming = [
                    dataclasses.replace(s, array=x) for x, s in zip(here, coming, strict=True)
                ]
            arriving = self.gathers.start(
                coming,
                [self.routes[v] for v in missing],
                [self._keys.get(v) for v in missing],
            )
            self.sources.update((missing[at], x) for at, x in arriving.secondary.items())
            self._arriving[i] = arriving
            if self.order.chained and missing:
                self._arrived = arriving.buffers
        return entry

    def take(self, i: int) -> dict[Value, jax.Array]:
        """Return the whole leaves of segment `i`. Call this once for each segment, in order."""
        missing = self._missing[i]
        whole: dict[Value, jax.Array] = {}
        if missing:
            routes = [self.routes[v] for v in missing]
            found = self.gathers.finish(self._arriving.pop(i), routes)
            whole.update(zip(missing, found, strict=True))
        leaves = {v: whole[v] if v in whole else self.live.pop(v) for v in self.order.units[i]}
        self.live.update((v, leaves[v]) for v in self.order.keeps[i])
        return leaves


def stacked_leaves(segment: Segment) -> tuple[Value, ...]:
    """Return the leaves that a loop slices; () if it is no loop."""
    if not isinstance(segment, LayerLoop):
        return ()
    return tuple(dict.fromkeys(leaf for leaf, _ in segment.stacked.values()))


def missing_leaves(order: FetchOrder, live: Collection[Value]) -> list[tuple[Value, ...]]:
    """Return the leaves that each segment must gather, as no segment before it kept them.

    Args:
      order: the order of a pass.
      live: the leaves that are whole when the pass begins.
    """
    live = set(live)
    missing = []
    for unit, kept in zip(order.units, order.keeps, strict=True):
        missing.append(tuple(v for v in unit if v not in live))
        live = live.difference(unit).union(kept)
    return missing


def _keys(leaves: Iterable[Value], key: jax.Array | None) -> dict[Value, jax.Array]:
    """Return a key for each leaf, the same in every pass."""
    if key is None:
        return {}
    return {leaf: jax.random.fold_in(key, i) for i, leaf in enumerate(leaves)}
