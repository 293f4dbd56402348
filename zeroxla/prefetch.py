"""When gathers start: each at the entry of the segment that its tie point names.

A tie is an `optimization_barrier`: what comes out exists only after all that went in. XLA keeps
barriers until its schedule is made, so a tie bounds how early a collective may start. But a barrier
loses an input that nothing else reads and whose output is not read: what others are tied to must go
on through the barrier, or be a value that certainly has other readers.

With prefetch each gather is also tied to what the one before it gave. Else XLA combines the gather
of the next unit with that of the unit after it, which may start only later, so both come late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from zeroxla.collectives import Collectives
from zeroxla.placement import Placement
from zeroxla.trace import Value

Arrays = Mapping[Value, jax.Array]


def tie(arrays: Sequence[Any], to: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
    """Return `arrays` (some may be None) such that none exists before all of `to` do, and `to`, to
    be read from now on."""
    present = [x for x in arrays if x is not None]
    if not to or not present:
        return list(arrays), list(to)
    tied = lax.optimization_barrier((*present, *to))
    rest = iter(tied)
    return [None if x is None else next(rest) for x in arrays], list(tied[len(present) :])


def tie_points(
    sizes: Sequence[int],
    budget: int | None,
    *,
    loops: Collection[int] = (),
    in_loop: bool = False,
) -> list[int]:
    """For each segment the earliest one at whose entry its gather may start.

    The elements gathered ahead by then, its own included, are at most `budget`; None is one segment
    ahead. No gather runs ahead of a whole loop: beside a loop nothing else runs, and the unit would
    be alive through all its turns.

    Args:
      sizes: elements that each segment gathers when it starts, in the order in which they run.
      budget: see `ZeroConfig.prefetch_bucket`.
      loops: the segments that are loops.
      in_loop: the segments are the body of a loop, and its first unit may be gathered in the turn
        before: -1.
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


class Fetches:
    """The gathers of one pass over the segments of a plan, forward or backward.

    Args:
      units: the leaves that each segment reads, in the order of the pass.
      stacked: the stacked leaves of each loop, which its body gathers; () for other segments. The
        gather of the first turn may stand before the loop, so these shards are tied too.
      keeps: of each segment's leaves, those that stay whole for a later use.
      points: from `tie_points`.
      chained: each gather is tied to the one before it.
      shards: what this device stores of each leaf.
      live: the leaves that are whole when the pass begins.
    """

    def __init__(
        self,
        *,
        units: Sequence[Sequence[Value]],
        stacked: Sequence[Sequence[Value]],
        keeps: Sequence[Collection[Value]],
        points: Sequence[int],
        chained: bool,
        collectives: Collectives,
        placements: Mapping[Value, Placement],
        shards: Arrays,
        live: Arrays,
    ) -> None:
        self.units, self.stacked, self.keeps, self.points = units, stacked, keeps, points
        self.collectives, self.placements, self.chained = collectives, placements, chained
        self.shards, self.live = dict(shards), dict(live)
        self.missing = _missing(units, keeps, self.live)
        self.arrived: list[jax.Array] = []  # what the last gather gave
        self.wires: dict[int, list[jax.Array]] = {}  # given, not yet cut into leaves
        self.enter(-1, [])

    def enter(self, point: int, entry: Sequence[jax.Array]) -> list[jax.Array]:
        """Start the gathers that may start at the entry of segment `point`.

        Args:
          point: position in the pass.
          entry: what the segment reads that none of them may run ahead of.

        Returns:
          `entry`, tied: what the segment must read.
        """
        entry = list(entry)
        for i, start in enumerate(self.points):
            leaves = (*self.missing[i], *self.stacked[i])
            if start != point or not leaves:
                continue
            after = [*entry, *self.arrived]
            tied, after = tie([self.shards[v] for v in leaves], after)
            entry = after[: len(entry)]
            self.shards.update(zip(leaves, tied, strict=True))
            wires = self.collectives.gather_wires(
                tied[: len(self.missing[i])], [self.placements[v] for v in self.missing[i]]
            )
            self.wires[i] = wires
            if self.chained and wires:
                self.arrived = wires
        return entry

    def take(self, i: int) -> dict[Value, jax.Array]:
        """Return the whole leaves of segment `i`; call once for each segment, in order."""
        placements = [self.placements[v] for v in self.missing[i]]
        found = self.collectives.cut(self.wires.pop(i, []), placements)
        whole = dict(zip(self.missing[i], found, strict=True))
        leaves = {v: whole[v] if v in whole else self.live.pop(v) for v in self.units[i]}
        self.live.update((v, leaves[v]) for v in self.keeps[i])
        return leaves


def _missing(
    units: Sequence[Sequence[Value]], keeps: Sequence[Collection[Value]], live: Collection[Value]
) -> list[tuple[Value, ...]]:
    """Return the leaves that each segment must gather: those that nothing before it kept."""
    live = set(live)
    missing = []
    for unit, kept in zip(units, keeps, strict=True):
        missing.append(tuple(v for v in unit if v not in live))
        live = live.difference(unit).union(kept)
    return missing
