"""`Keeper`: chooses what segments of a plan keep, and which gathered leaves stay for backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from zeroxla.fetch.keeping.integer_program import (
    HostTraffic,
    best_choice,
    best_combination,
    best_together,
)
from zeroxla.fetch.keeping.link_seconds import gather_seconds, hidden_bytes, seconds_per_byte
from zeroxla.fetch.keeping.places import SegmentPlace, times_alive
from zeroxla.fetch.keeping.residual_graph import DeviceRates, ResidualGraph
from zeroxla.fetch.keeping.reused_leaves import ReusedLeaves
from zeroxla.fetch.keeping.tradeoff import SegmentChoice
from zeroxla.fetch.residuals import Kept
from zeroxla.fetch.segments import FetchPlan, Straight
from zeroxla.fetch.traced_segment import TracedSegment

MAX_POLISHED = 6
"""Most kinds of segments whose choice is improved by an integer program of their own."""

_ROUNDED = 1 + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Keeping:
    """What the segments of a plan keep.

    Attributes:
      places: the straight segments, in the order of forward.
      choices: the choice of each.
      gap: the share by which the added seconds may exceed the least that the corners of the
        segments' tradeoffs allow.
      rates: what computing again and moving costs.
      reused: the gathered leaves that stay whole from forward to backward.
      twice_s, twice_flops: the seconds and FLOPs of segments that run forward a second time, though
        the model does not ask for it.
    """

    places: tuple[SegmentPlace, ...]
    choices: tuple[SegmentChoice, ...]
    gap: float
    rates: DeviceRates = dataclasses.field(default_factory=DeviceRates)
    reused: ReusedLeaves = dataclasses.field(default_factory=ReusedLeaves)
    twice_s: float = 0.0
    twice_flops: float = 0.0

    def of(self, plan: FetchPlan, segment: Straight, summed: object) -> tuple[TracedSegment, Kept]:
        """Return a segment, traced, and what it keeps. It was traced with `plan` and `summed`."""
        return self._by_segment[segment]

    @functools.cached_property
    def _by_segment(self) -> Mapping[Straight, tuple[TracedSegment, Kept]]:
        return {p.segment: p.keeping(c) for p, c in self._pairs()}

    @functools.cached_property
    def num_bytes(self) -> float:
        """The bytes of such leaves, of kept values and of the residuals of the segment at hand,
        when most."""
        others = others_alive(self.places)
        of_values = _bytes_at_each(self.places, self.choices, others).max(initial=0.0)
        return self.reused.num_bytes + float(of_values)

    @property
    def kept_bytes(self) -> float:
        """The bytes that all segments keep on the device, all turns of loops included."""
        return sum(c.num_bytes * p.turns for p, c in self._pairs())

    @property
    def host_bytes(self) -> float:
        """The bytes that all segments keep on the host."""
        return sum(c.host_bytes * p.turns for p, c in self._pairs())

    @property
    def seconds(self) -> float:
        """The seconds that computing again, moving and gathering again add to a micro-batch, by
        the cost model.

        What goes to the host runs beside forward, and comes back beside backward, as far as their
        products take as long.
        """
        return self.own_seconds + gather_seconds(self.places, self.reused, self.rates)

    @property
    def own_seconds(self) -> float:
        """The same without gathering again."""
        late_bytes = max(self.host_bytes - hidden_bytes(self.places, self.rates), 0.0)
        again = sum(c.seconds * p.turns for p, c in self._pairs())
        return self.twice_s + again + late_bytes * seconds_per_byte(self.rates)

    @property
    def flops(self) -> float:
        """The FLOPs of what a micro-batch computes again."""
        return self.twice_flops + sum(c.flops * p.turns for p, c in self._pairs())

    @property
    def share_again(self) -> float:
        """The FLOPs of what is computed again, as a share of all that a micro-batch computes, with
        backward taken to compute twice what forward does."""
        forward = sum(p.kind.forward_flops * p.turns for p in self.places)
        return self.flops / max(3 * forward, 1.0)

    def is_as(self, other: Keeping) -> bool:
        """Return whether the same numbers were chosen for another trace of the same loss."""
        return self.choices == other.choices and self.reused == other.reused

    def _pairs(self) -> Iterator[tuple[SegmentPlace, SegmentChoice]]:
        return zip(self.places, self.choices, strict=True)


class Keeper:
    """Chooses what a plan's segments keep, and which gathered leaves stay for backward.

    Args:
      places: the straight segments of a plan, in the order of forward.
      rates: what computing again and moving costs.
      levels: the leaves that may stay whole, from none.
      twice_s, twice_flops: the seconds and FLOPs of segments that run forward a second time, though
        the model does not ask for it.
    """

    def __init__(
        self,
        places: Sequence[SegmentPlace],
        rates: DeviceRates,
        levels: Sequence[ReusedLeaves] = (ReusedLeaves(),),
        *,
        twice_s: float = 0.0,
        twice_flops: float = 0.0,
    ) -> None:
        self.places, self.rates, self.levels = tuple(places), rates, tuple(levels)
        self._twice = {"twice_s": twice_s, "twice_flops": twice_flops}
        self._others = others_alive(self.places)

    def everything(self) -> Keeping:
        """Return the choice that computes nothing again that takes time."""
        return self._keeping([p.points[0] for p in self.places], 0.0)

    def least(self) -> Keeping:
        """Return the choice that keeps least."""
        return self._keeping([p.points[-1] for p in self.places], 0.0)

    def within(self, limit: float, *, reuse: bool = False) -> Keeping:
        """Return the choice of the least seconds whose `num_bytes` are at most `limit`; the choice
        that keeps least if there is none.

        Args:
          limit: bytes.
          reuse: whether gathered leaves stay for backward where that is faster.
        """
        best = self._within(limit)
        for reused in self.levels[1:] if reuse else ():
            if gather_seconds(self.places, reused, self.rates) < best.seconds:
                found = self._within(limit - reused.num_bytes)
                found = dataclasses.replace(found, reused=reused)
                if found.num_bytes <= limit and found.seconds < best.seconds:
                    best = found
        return best

    def _within(self, limit: float) -> Keeping:
        """Return the same with no leaves used again."""
        if not self.places:
            return self._keeping([], 0.0)
        if self.everything().num_bytes <= limit:
            return self.everything()
        graphs, turns = [p.graph for p in self.places], [p.turns for p in self.places]
        # The exact program takes no account of what moves beside computation.
        moves = self.rates.host_bytes_per_s is not None
        exact = None if moves else best_together(graphs, turns, self._others, limit)
        if exact is not None and (found := self._keeping(exact, 0.0)).num_bytes <= limit * _ROUNDED:
            return found
        solved = best_combination(
            [[c.seconds * p.turns for c in p.points] for p in self.places],
            [[c.num_bytes for c in p.points] for p in self.places],
            [[_own_bytes(p.graph, c) for c in p.points] for p in self.places],
            self._others,
            limit,
            HostTraffic(
                num_bytes=[[c.host_bytes * p.turns for c in p.points] for p in self.places],
                hidden=hidden_bytes(self.places, self.rates),
                seconds_per_byte=seconds_per_byte(self.rates),
            ),
        )
        if solved is None:
            return self.least()
        picked, gap = solved
        choices = [p.points[i] for p, i in zip(self.places, picked, strict=True)]
        if not any(c.on_host for c in choices):
            choices = self._polished(choices, limit)
        return self._keeping(choices, gap)

    def _keeping(self, choices: Sequence[SegmentChoice], gap: float) -> Keeping:
        return Keeping(
            places=self.places,
            choices=tuple(choices),
            gap=gap,
            rates=self.rates,
            reused=self.levels[0],
            **self._twice,
        )

    def _polished(self, choices: list[SegmentChoice], limit: float) -> list[SegmentChoice]:
        """Spend the bytes that are left: give segments one by one the best choice within their own
        bytes and those, which need not be a corner of the tradeoff."""
        order = sorted(
            range(len(choices)), key=lambda i: (-choices[i].seconds * self.places[i].turns, i)
        )
        solved: dict[tuple, SegmentChoice | None] = {}
        for i in order:
            if choices[i].seconds <= 0:
                break
            weights = self._others[:, i]
            left = limit - _bytes_at_each(self.places, choices, self._others)
            room = min((s / w for s, w in zip(left, weights, strict=True) if w > 0), default=0.0)
            allowed = choices[i].num_bytes + max(room, 0.0)
            graph = self.places[i].graph
            key = graph.signature, choices[i].num_bytes, int(allowed)
            if key not in solved:
                if len(solved) == MAX_POLISHED:
                    break
                solved[key] = best_choice(graph, allowed)
            better = solved[key]
            if better is not None and better.seconds < choices[i].seconds * (1 - 1e-9):
                changed = [*choices[:i], better, *choices[i + 1 :]]
                # What is kept besides residuals is there with them at the segment's own moment.
                if _bytes_at_each(self.places, changed, self._others).max() <= limit * _ROUNDED:
                    choices = changed
        return choices


def _bytes_at_each(
    places: Sequence[SegmentPlace], choices: Sequence[SegmentChoice], others: np.ndarray
) -> np.ndarray:
    """Return the bytes of kept values, and of the residuals of the segment at hand, while backward
    is at each segment. `others` is `others_alive(places)`."""
    kept = np.array([c.num_bytes for c in choices], float)
    own = [_own_bytes(p.graph, c) for p, c in zip(places, choices, strict=True)]
    return others @ kept + np.array(own, float)


def others_alive(places: Sequence[SegmentPlace]) -> np.ndarray:
    """Return how many times what a segment keeps, a column, is in memory while backward is at
    another segment, or at another turn of its own, a row."""
    return np.maximum(times_alive(places) - np.eye(len(places)), 0.0)


def _own_bytes(graph: ResidualGraph, choice: SegmentChoice) -> float:
    """Return the bytes of one turn of a segment while it runs backward: all its residuals are
    there, kept or computed again."""
    return float(graph.bytes_in_backward(choice.on_device, choice.again))
