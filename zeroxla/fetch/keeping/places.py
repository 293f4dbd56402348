"""`SegmentPlace`: a straight segment of a plan, and when the values that it keeps are in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from zeroxla.fetch.keeping.residual_graph import DeviceRates, ResidualGraph, seconds_of
from zeroxla.fetch.keeping.tradeoff import SegmentChoice, tradeoff
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Straight
from zeroxla.fetch.traced_segment import TracedSegment, trace_segment
from zeroxla.program.flops import flops_of
from zeroxla.program.trace import Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentPlace:
    """A straight segment of a plan or of the body of a loop or `jax.checkpoint` inside it.

    Attributes:
      traced: the segment with its derivative.
      graph: what its residuals are computed from.
      points: the best ways to keep less of it, from all to the least.
      forward_s: the seconds of one turn forward.
      path: for each plan from the outermost to the segment's own, the number of the segment there,
        with the number of turns if it is a loop, and 0 if it is a `jax.checkpoint`.
    """

    traced: TracedSegment
    graph: ResidualGraph
    points: tuple[SegmentChoice, ...]
    forward_s: float
    path: tuple[tuple[int, int], ...]

    @property
    def forward_flops(self) -> float:
        """The FLOPs of one turn forward."""
        return sum(map(flops_of, self.traced.segment.equations))

    @property
    def runs_twice(self) -> bool:
        """Whether forward runs a second time before backward."""
        return any(turns == 0 for _, turns in self.path)

    @property
    def turns(self) -> int:
        """How often a step runs the segment forward."""
        return math.prod(max(turns, 1) for _, turns in self.path)

    def times_alive(self, moment: SegmentPlace) -> int:
        """Return how many times the values that this segment keeps are in memory while backward is
        at another segment.

        Forward has stacked those of all turns of a loop, and they are there while the loop runs
        backward. In a `jax.checkpoint` forward runs again before backward, so they are there only
        within.
        """
        last_remat = max((i for i, (_, turns) in enumerate(self.path) if turns == 0), default=-1)
        inside = self.path[last_remat + 1 :]
        if moment.path[: last_remat + 1] != self.path[: last_remat + 1]:
            return 0
        turns = math.prod(max(turns, 1) for _, turns in inside)
        for mine, other in zip(inside, moment.path[last_remat + 1 :], strict=False):
            if mine[0] != other[0]:
                return turns if mine[0] < other[0] else 0
            if mine[1] > 1:
                return turns
        return turns


class PlaceFinder:
    """Finds the places of a plan. The tradeoff of each kind of segment is found once.

    Args:
      rates: what an equation, a gather and a move cost.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self.rates = rates
        self._found: dict[tuple, tuple[SegmentChoice, ...]] = {}

    def find(
        self,
        plan: FetchPlan,
        summed: Collection[Value],
        lasting: Collection[Value] = (),
        path: tuple[tuple[int, int], ...] = (),
    ) -> list[SegmentPlace]:
        """Return the straight segments of a plan, in the order of forward.

        A value that a later segment keeps by reference in any case costs an earlier one nothing.

        Args:
          plan: the plan.
          summed: the values whose cotangents are summed one reader at a time, as
            `PassPlan.summed`.
          lasting: values that are in memory until backward anyway, besides those that the plan's
            caller keeps.
          path: where the plan is.
        """
        lasting = {*lasting, *plan.recoverable}
        found: list[SegmentPlace] = []
        for i, seg in reversed([*enumerate(plan.segments)]):
            if isinstance(seg, Straight):
                place = self._place(plan, seg, summed, lasting, (*path, (i, 1)))
                lasting.update(_always_referenced(place))
                inside = [place]
            elif isinstance(seg, LayerLoop):
                here = (*path, (i, seg.scan.length))
                inside = self.find(seg.body, seg.body.leaves, (), here)
            else:
                here = (*path, (i, 0))
                inside = self.find(seg.body, seg.body.leaves, seg.body.inputs, here)
                lasting.update(seg.inputs)
            found = [*inside, *found]
        return found

    def _place(
        self,
        plan: FetchPlan,
        segment: Straight,
        summed: Collection[Value],
        lasting: Collection[Value],
        path: tuple[tuple[int, int], ...],
    ) -> SegmentPlace:
        traced = trace_segment(segment, plan.active, plan.constants, summed)
        graph = ResidualGraph.of(traced, self.rates, lasting)
        signature = graph.signature
        if signature not in self._found:
            self._found[signature] = tuple(tradeoff(graph))
        return SegmentPlace(
            traced=traced,
            graph=graph,
            points=self._found[signature],
            forward_s=sum(seconds_of(eq, self.rates) for eq in segment.equations),
            path=path,
        )


def _always_referenced(place: SegmentPlace) -> list[Value]:
    """Return the inputs of a segment that it keeps even if it keeps least."""
    least = {place.graph.values[i] for i in place.points[-1].on_device}
    segment, stand_ins = place.traced.segment, place.traced.stand_ins
    return [v for v in segment.inputs if stand_ins[v] in least]


def times_alive(places: Sequence[SegmentPlace]) -> np.ndarray:
    """Return `SegmentPlace.times_alive` of each place, a column, at each place, a row."""
    alive = [[place.times_alive(moment) for place in places] for moment in places]
    return np.array(alive, float).reshape(len(places), len(places))
