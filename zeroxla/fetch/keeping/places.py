"""`Place`: a straight segment of a plan, and when the values that it keeps are in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from zeroxla.fetch.keeping.residual_graph import Rates, ResidualGraph
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Straight
from zeroxla.fetch.traced_segment import TracedSegment, trace_segment
from zeroxla.program.trace import Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A straight segment of a plan or of the body of a loop or `jax.checkpoint` inside it.

    Attributes:
      traced: the segment with its derivative.
      graph: what its residuals are computed from.
      path: for each plan from the outermost to the segment's own, the number of the segment there,
        with the number of turns if it is a loop, and 0 if it is a `jax.checkpoint`.
    """

    traced: TracedSegment
    graph: ResidualGraph
    path: tuple[tuple[int, int], ...]

    @property
    def turns(self) -> int:
        """How often a step runs the segment forward."""
        return math.prod(max(turns, 1) for _, turns in self.path)

    def times_alive(self, moment: Place) -> int:
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


def places_of(
    plan: FetchPlan,
    summed: Collection[Value],
    rates: Rates,
    lasting: Collection[Value] = (),
    path: tuple[tuple[int, int], ...] = (),
) -> Iterator[Place]:
    """Yield the straight segments of a plan, in the order of forward.

    Args:
      plan: the plan.
      summed: the values whose cotangents are summed one reader at a time, as `PassPlan.summed`.
      rates: what an equation and a move cost.
      lasting: values that are in memory until backward anyway, besides those that the plan's caller
        keeps.
      path: where the plan is.
    """
    lasting = {*lasting, *plan.recoverable}
    for i, seg in enumerate(plan.segments):
        if isinstance(seg, Straight):
            traced = trace_segment(seg, plan.active, plan.constants, summed)
            graph = ResidualGraph.of(traced, rates, lasting)
            yield Place(traced=traced, graph=graph, path=(*path, (i, 1)))
        elif isinstance(seg, LayerLoop):
            here = (*path, (i, seg.scan.length))
            yield from places_of(seg.body, seg.body.leaves, rates, (), here)
        else:
            here = (*path, (i, 0))
            yield from places_of(seg.body, seg.body.leaves, rates, seg.body.inputs, here)


def times_alive(places: Sequence[Place]) -> np.ndarray:
    """Return `Place.times_alive` of each place, a column, at each place, a row."""
    alive = [[place.times_alive(moment) for place in places] for moment in places]
    return np.array(alive, float).reshape(len(places), len(places))
