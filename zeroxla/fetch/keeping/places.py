"""`SegmentPlace`: a straight segment of a plan, and when the values that it keeps are in memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Sequence

import numpy as np

from zeroxla.fetch.keeping.keep_everything import KeepEverything
from zeroxla.fetch.keeping.residual_graph import DeviceRates, ResidualGraph, seconds_of, values_of
from zeroxla.fetch.keeping.tradeoff import SegmentChoice, tradeoff
from zeroxla.fetch.residuals import Kept
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Straight
from zeroxla.fetch.traced_segment import TracedSegment, trace_segment
from zeroxla.program.flops import flops_of
from zeroxla.program.likeness import likeness, likeness_of_run
from zeroxla.program.trace import Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SegmentKind:
    """Segments that compute the same, as one. They differ in their leaves and names alone.

    Attributes:
      traced: one of them with its derivative.
      graph: what its residuals are computed from.
      points: the best ways to keep less of it, from all to the least.
      forward_s: the seconds of one turn forward.
      forward_flops: the FLOPs of one turn forward.
    """

    traced: TracedSegment
    graph: ResidualGraph
    points: tuple[SegmentChoice, ...]
    forward_s: float
    forward_flops: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SegmentPlace:
    """A straight segment of a plan or of the body of a loop or `jax.checkpoint` inside it.

    Attributes:
      segment: the segment.
      kind: its kind. All segments that compute the same have one.
      path: for each plan from the outermost to the segment's own, the number of the segment there,
        with the number of turns if it is a loop, and 0 if it is a `jax.checkpoint`.
      trace: traces the segment with its derivative.
    """

    segment: Straight
    kind: SegmentKind
    path: tuple[tuple[int, int], ...]
    trace: Callable[[], TracedSegment]

    @property
    def graph(self) -> ResidualGraph:
        """The equations that compute its residuals, with the values of `kind.traced`."""
        return self.kind.graph

    @property
    def points(self) -> tuple[SegmentChoice, ...]:
        """The best ways to keep less of it, from all to the least."""
        return self.kind.points

    def leaves_of_backward(self) -> tuple[Value, ...]:
        """Return the segment's leaves that its derivative reads."""
        like = self.kind.traced
        read = like.leaves_of_backward()
        pairs = zip(self.segment.leaves, like.segment.leaves, strict=True)
        return tuple(own for own, other in pairs if other in read)

    def always_referenced(self) -> tuple[Value, ...]:
        """Return the segment's inputs that it keeps even if it keeps least."""
        like, least = self.kind.traced, self.points[-1].on_device
        kept = {self.graph.values[i] for i in least}
        pairs = zip(self.segment.inputs, like.segment.inputs, strict=True)
        return tuple(own for own, other in pairs if like.stand_ins[other] in kept)

    def keeping(self, choice: SegmentChoice) -> tuple[TracedSegment, Kept]:
        """Return the segment with its derivative, and what it keeps by a choice.

        Inputs of the segment, which are kept by reference, are left out by `linearize`.
        """
        traced = self.trace()
        values = values_of(traced)
        assert [v.aval for v in values] == [v.aval for v in self.graph.values]
        return traced, Kept(
            on_device=frozenset(values[i] for i in choice.on_device),
            on_host=frozenset(values[i] for i in choice.on_host),
        )

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
    """Finds the places of a plan. Segments that compute the same are traced and weighed once.

    Args:
      rates: what an equation, a gather and a move cost.

    Attributes:
      rates: the same.
      everything: the choice of a step without a budget. Segments that were traced for it are not
        traced again.
    """

    def __init__(self, rates: DeviceRates) -> None:
        self.rates, self.everything = rates, KeepEverything()
        self._kinds: dict[Hashable, SegmentKind] = {}
        self._tradeoffs: dict[tuple, tuple[SegmentChoice, ...]] = {}
        self._likeness = functools.cache(likeness)

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
                lasting.update(place.always_referenced())
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
        given = (*segment.leaves, *segment.inputs)
        traced = self.everything.traced.get(segment)
        trace = functools.partial(trace_segment, segment, plan.active, plan.constants, summed)
        key = (
            likeness_of_run(segment.equations, given, segment.outputs, self._likeness),
            len(segment.leaves),
            *(tuple(v in s for v in given) for s in (plan.active, plan.constants, summed, lasting)),
            *(tuple(v in s for v in segment.outputs) for s in (plan.active, lasting)),
        )
        if key not in self._kinds:
            traced = traced or trace()
            self._kinds[key] = self._kind(traced, lasting)
        known = (lambda: traced) if traced else trace
        return SegmentPlace(segment=segment, kind=self._kinds[key], path=path, trace=known)

    def _kind(self, traced: TracedSegment, lasting: Collection[Value]) -> SegmentKind:
        graph = ResidualGraph.of(traced, self.rates, lasting)
        signature = graph.signature
        if signature not in self._tradeoffs:
            self._tradeoffs[signature] = tuple(tradeoff(graph))
        equations = traced.segment.equations
        return SegmentKind(
            traced=traced,
            graph=graph,
            points=self._tradeoffs[signature],
            forward_s=sum(seconds_of(eq, self.rates) for eq in equations),
            forward_flops=sum(map(flops_of, equations)),
        )


def times_alive(places: Sequence[SegmentPlace]) -> np.ndarray:
    """Return `SegmentPlace.times_alive` of each place, a column, at each place, a row."""
    alive = [[place.times_alive(moment) for place in places] for moment in places]
    return np.array(alive, float).reshape(len(places), len(places))
