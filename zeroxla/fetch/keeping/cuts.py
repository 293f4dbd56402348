"""`cut_segments`: cuts large segments where few bytes cross, so that not all of a segment's
residuals need be there at once when they are computed again.

Without a budget a segment is as long as a unit of leaves lasts, and a model whose leaves all stay
whole is one segment.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from zeroxla.fetch.fetch_plan import is_summary
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Segment, Straight
from zeroxla.program.primitives import RENAMES
from zeroxla.program.trace import Equation, Value, bytes_of, closure

PARTS = 16
"""A piece is cut again while it makes more than one in so many bytes of all that forward makes."""
LEAST_SHARE = 1 / 8
"""Each side of a cut makes at least this share of the piece's bytes."""
MOST_CROSSING = 1 / 6
"""At most this share of the piece's bytes crosses a cut."""


def cut_segments(plan: FetchPlan) -> FetchPlan:
    """Return the plan with its large segments cut, those of its bodies too."""
    return _cut(plan, _made_bytes(plan) / PARTS)


def _cut(plan: FetchPlan, limit: float) -> FetchPlan:
    segments: list[Segment] = []
    for seg in plan.segments:
        if isinstance(seg, Straight):
            segments += _Cutter(plan, seg).pieces(limit)
        else:
            segments.append(dataclasses.replace(seg, body=_cut(seg.body, limit)))
    return dataclasses.replace(plan, segments=tuple(segments))


def _made_bytes(plan: FetchPlan) -> float:
    """Return the bytes that forward makes, all turns of loops included."""
    total = 0.0
    for seg in plan.segments:
        if isinstance(seg, Straight):
            total += sum(map(_weight, seg.equations))
        else:
            turns = seg.scan.length if isinstance(seg, LayerLoop) else 1
            total += turns * _made_bytes(seg.body)
    return total


def _weight(eq: Equation) -> int:
    return 0 if eq.name in RENAMES else sum(map(bytes_of, eq.outputs))


class _Cutter:
    """Cuts one segment.

    Equations that leaves and constants alone determine have no place of their own: each piece that
    reads their results repeats them.
    """

    def __init__(self, plan: FetchPlan, segment: Straight) -> None:
        self.segment = segment
        known = {*segment.leaves, *plan.constants}
        self.known: dict[Value, Equation] = {}
        self.placed: list[Equation] = []
        for eq in segment.equations:
            if known.issuperset(eq.values) and not eq.is_pinned and not is_summary(eq):
                known.update(eq.outputs)
                self.known.update((v, eq) for v in eq.outputs)
            else:
                self.placed.append(eq)
        self.leaves = [self._leaves_of(eq.values) for eq in self.placed]

    def _leaves_of(self, values: Sequence[Value]) -> frozenset[Value]:
        return frozenset(self.segment.leaves).intersection(closure(values, self.known)[1])

    def pieces(self, limit: float) -> list[Straight]:
        """Return the segment in pieces, each of about `limit` bytes if it can be cut."""
        bounds = self._bounds(0, len(self.placed), limit)
        if len(bounds) == 2:
            return [self.segment]
        found: list[Straight] = []
        wanted = set(self.segment.outputs)
        for start, stop in reversed(list(itertools.pairwise(bounds))):
            piece = self._piece(start, stop, wanted, is_last=stop == len(self.placed))
            wanted.update(piece.inputs)
            found.append(piece)
        return found[::-1]

    def _bounds(self, start: int, stop: int, limit: float) -> list[int]:
        cut = self._best_cut(start, stop, limit)
        if cut is None:
            return [start, stop]
        return [*self._bounds(start, cut, limit), *self._bounds(cut, stop, limit)[1:]]

    def _best_cut(self, start: int, stop: int, limit: float) -> int | None:
        """Return the place between two equations at which the fewest bytes cross; None if the piece
        is small enough, or no place is good enough."""
        equations = self.placed[start:stop]
        total = sum(map(_weight, equations))
        if total <= limit:
            return None
        last = {v: i for i, eq in enumerate(equations) for v in eq.values}
        outside = {v for eq in self.placed[stop:] for v in eq.values}.union(self.segment.outputs)
        later: dict[Value, int] = {}
        for i, leaves in enumerate(self.leaves[start:stop]):
            later.update(dict.fromkeys(leaves, i))
        best, best_bytes = None, MOST_CROSSING * total
        before = 0
        alive: dict[Value, int] = {}
        shared: dict[Value, int] = {}  # leaves that were read, and by which equation last
        for i, eq in enumerate(equations[:-1]):
            before += _weight(eq)
            alive.update((v, bytes_of(v)) for v in eq.outputs if v in last and v not in outside)
            alive = {v: size for v, size in alive.items() if last[v] > i}
            shared.update((v, later[v]) for v in self.leaves[start + i])
            balanced = LEAST_SHARE * total <= before <= (1 - LEAST_SHARE) * total
            if balanced and not any(until > i for until in shared.values()):
                crossing = sum(alive.values())
                if crossing <= best_bytes:
                    best, best_bytes = start + i + 1, crossing
        return best

    def _piece(self, start: int, stop: int, wanted: set[Value], *, is_last: bool) -> Straight:
        placed = self.placed[start:stop]
        made = {v for eq in placed for v in eq.outputs}
        reads = [v for eq in placed for v in eq.values]
        own = [v for eq in placed for v in eq.outputs if v in wanted]
        if is_last:  # Outputs that follow from leaves alone belong to no placed equation.
            rest = [v for v in self.segment.outputs if v in self.known or v in self.segment.leaves]
            reads, own = [*reads, *rest], [*own, *rest]
        known, roots = closure([v for v in reads if v not in made], self.known)
        leaves = tuple(v for v in self.segment.leaves if v in roots)
        return Straight(
            leaves=leaves,
            equations=(*known, *placed),
            inputs=tuple(v for v in roots if v not in leaves),
            outputs=tuple(dict.fromkeys(own)),
        )
