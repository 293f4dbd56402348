"""`tradeoff`: the best ways to keep less of a segment, from all residuals to the least.

For a price of a kept byte, the values that are worth keeping are the minimum cut of a graph. A
value that backward needs is kept, at the price of its bytes, or goes to the host, for the seconds
of the way, or the equation that makes it runs again, for which its operands are needed. A search
over prices finds every choice on the convex hull of (bytes, seconds).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from zeroxla.fetch.keeping.residual_graph import ResidualGraph
from zeroxla.program.min_cut import Edge, source_side

MAX_POINTS = 24
HIDDEN = 0.98
"""The share of moves that run beside computation, where all of them may."""
UNITS = 2.0**28
"""What all costs of a cut add up to, in the whole numbers that the cut counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentChoice:
    """What is kept of a segment.

    Attributes:
      on_device, on_host: the kept values, by number.
      again: the equations that run again, by number.
      num_bytes: the bytes of what is kept on the device.
      host_bytes: the bytes of what is kept on the host.
      seconds: the seconds that running again adds.
      flops: the FLOPs of what runs again.
    """

    on_device: frozenset[int]
    on_host: frozenset[int]
    again: frozenset[int]
    num_bytes: int
    host_bytes: int
    seconds: float
    flops: float

    @staticmethod
    def of(
        graph: ResidualGraph,
        again: frozenset[int],
        host: Iterable[int] = (),
    ) -> SegmentChoice:
        """Return the choice under which certain equations run again.

        Args:
          graph: the segment's graph.
          again: the equations. Nothing runs again that no residual needs.
          host: the values that wait on the host if they are kept.
        """
        again = _useful(graph, again)
        needed = set(graph.residuals).union(*(graph.reads[e] for e in again))
        kept = {v for v in needed if graph.maker[v] not in again}
        on_host = kept.intersection(host)
        on_device = kept - on_host
        leaves = {w for e in again for w in graph.gathers[e]}
        return SegmentChoice(
            on_device=frozenset(on_device),
            on_host=frozenset(on_host),
            again=again,
            num_bytes=sum(graph.bytes[v] for v in on_device),
            host_bytes=sum(graph.bytes[v] for v in on_host),
            seconds=math.fsum(
                [
                    *(graph.seconds[e] for e in again),
                    *(graph.gather_seconds[w] for w in leaves),
                ]
            ),
            flops=math.fsum(graph.flops[e] for e in again),
        )


def _useful(graph: ResidualGraph, again: frozenset[int]) -> frozenset[int]:
    """Return those of some equations that residuals need."""
    needed, stack = set(), list(graph.residuals)
    while stack:
        eq = graph.maker[stack.pop()]
        if eq in again and eq not in needed:
            needed.add(eq)
            stack.extend(graph.reads[eq])
    return frozenset(needed)


def cheapest(graph: ResidualGraph, price: float, beside: float = 0.0) -> SegmentChoice:
    """Return the choice of the least seconds + price * bytes kept on the device.

    Args:
      graph: the segment's graph.
      price: seconds for a byte.
      beside: the share of moves to the host and back that run beside computation, and cost nothing.
    """
    num_values, num_equations = len(graph.values), len(graph.seconds)
    of_equation = num_values
    of_leaf = of_equation + num_equations
    source = of_leaf + len(graph.gather_seconds)
    sink = source + 1
    edges: list[Edge] = [(source, v, math.inf) for v in graph.residuals]
    to_host = []
    for v, (size, eq) in enumerate(zip(graph.bytes, graph.maker, strict=True)):
        cost = price * size
        if (moving := (1 - beside) * graph.host_seconds[v]) < cost:
            cost = moving
            to_host.append(v)
        edges.append((v, sink if eq < 0 else of_equation + eq, cost))
    for e, seconds in enumerate(graph.seconds):
        edges.append((of_equation + e, sink, seconds))
        edges += [(of_equation + e, v, math.inf) for v in graph.reads[e]]
        edges += [(of_equation + e, of_leaf + w, math.inf) for w in graph.gathers[e]]
    edges += [(of_leaf + w, sink, seconds) for w, seconds in enumerate(graph.gather_seconds)]
    # The cut counts in whole numbers.
    scale = UNITS / max(math.fsum(cost for *_, cost in edges if math.isfinite(cost)), 1e-30)
    edges = [(a, b, cost * scale) for a, b, cost in edges]
    side = source_side(edges, sink + 1, source=source, sink=sink)
    again = frozenset(e for e in range(num_equations) if of_equation + e in side)
    return SegmentChoice.of(graph, again, to_host)


def tradeoff(graph: ResidualGraph) -> list[SegmentChoice]:
    """Return choices from the most bytes on the device to the least.

    They are the corners of the convex hull of all choices, at most `MAX_POINTS`: once with all
    moves to the host at their full cost, and once with nearly none.
    """
    found: dict[tuple, SegmentChoice] = {}
    for beside in (0.0, HIDDEN) if any(map(math.isfinite, graph.host_seconds)) else (0.0,):
        for choice in _hull(graph, beside):
            found.setdefault((choice.num_bytes, choice.host_bytes, choice.seconds), choice)
    return sorted(found.values(), key=lambda c: (-c.num_bytes, c.seconds, c.host_bytes))


def _hull(graph: ResidualGraph, beside: float) -> list[SegmentChoice]:
    """Return the corners for a share of moves that cost nothing; see `cheapest`."""
    if not graph.residuals:
        return [SegmentChoice.of(graph, frozenset())]

    def cost_of(choice: SegmentChoice) -> float:
        moved = (graph.host_seconds[v] for v in choice.on_host)
        return choice.seconds + (1 - beside) * math.fsum(moved)

    total = max(1, sum(graph.bytes))
    all_seconds = math.fsum(graph.seconds) + math.fsum(graph.gather_seconds)
    low, high = 1e-6 * min_seconds(graph) / total, 1e3 * max(all_seconds, 1e-12)
    first, last = cheapest(graph, low, beside), cheapest(graph, high, beside)
    found = [first, last]
    spans = [(first, last)]
    while spans and len(found) < MAX_POINTS:
        # The span with the most to gain first.
        spans.sort(
            key=lambda s: (s[0].num_bytes - s[1].num_bytes) * (cost_of(s[1]) - cost_of(s[0]))
        )
        more, less = spans.pop()
        saved_bytes, added_s = more.num_bytes - less.num_bytes, cost_of(less) - cost_of(more)
        if saved_bytes <= 0 or added_s <= 0:
            continue
        price = added_s / saved_bytes
        middle = cheapest(graph, price, beside)
        gain = cost_of(more) + price * (more.num_bytes - middle.num_bytes) - cost_of(middle)
        if gain <= 1e-9 * cost_of(less) or not less.num_bytes < middle.num_bytes < more.num_bytes:
            continue
        found.append(middle)
        spans += [(more, middle), (middle, less)]
    better: list[SegmentChoice] = []
    for choice in sorted(found, key=lambda c: (-c.num_bytes, cost_of(c))):
        while better and cost_of(better[-1]) >= cost_of(choice):
            better.pop()
        better.append(choice)
    return better


def min_seconds(graph: ResidualGraph) -> float:
    """Return the least seconds of an equation that takes any."""
    return min((s for s in graph.seconds if s > 0), default=1e-9)
