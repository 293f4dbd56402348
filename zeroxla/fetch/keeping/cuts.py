"""`cut_segments`: cuts large segments where few bytes cross, so that not all of a segment's
residuals need be there at once when they are computed again.

Without a budget a segment is as long as a unit of leaves lasts, and a model whose leaves all stay
whole is one segment. What crosses a cut is kept, in a loop once for every turn. So there are as
many cuts as make the sum least of what crosses them and of the largest piece. Or the pieces run a
second time before backward, as under `jax.checkpoint`: then only the segment's inputs are kept.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from zeroxla.fetch.fetch_plan import is_summary
from zeroxla.fetch.segments import FetchPlan, LayerLoop, Remat, Segment, Straight
from zeroxla.program.primitives import RENAMES
from zeroxla.program.trace import Equation, Value, bytes_of, closure

LEAST_SHARE = 1 / 8
"""Each side of a cut makes at least this share of the piece's bytes."""
MOST_CROSSING = 1 / 4
"""At most this share of the piece's bytes crosses a cut."""
OF_RESIDUALS = 1 / 2
"""About so many of the bytes that a piece makes are there while it runs backward."""
HALVINGS = 8
WORTH = 0.9
"""More cuts must bring the sum below this share."""


def cut_segments(plan: FetchPlan, *, runs_twice: bool = False) -> FetchPlan:
    """Return the plan with its large segments cut, those of its bodies too; the plan itself if no
    cut is worth its bytes.

    Args:
      plan: the plan.
      runs_twice: whether backward runs the pieces of a segment a second time. What crosses a cut is
        then there for one segment and one turn at a time.
    """
    cutters = dict(_cutters(plan, 1))
    pieces = [(c.whole, 1 if runs_twice else turns) for c, turns in cutters.values()]
    largest = max((piece.weight for piece, _ in pieces), default=0)
    best, best_bytes = float(largest), _bytes_with(pieces, largest)
    for halving in range(1, HALVINGS + 1):
        limit = largest / 2**halving
        if (num_bytes := _bytes_with(pieces, limit)) < WORTH * best_bytes:
            best, best_bytes = limit, num_bytes
    if best == largest:
        return plan
    by_segment = {seg: cutter for seg, (cutter, _) in cutters.items()}
    return _cut(plan, by_segment, best, runs_twice=runs_twice)


def _cut(
    plan: FetchPlan, cutters: Mapping[Straight, _Cutter], limit: float, *, runs_twice: bool
) -> FetchPlan:
    segments: list[Segment] = []
    for seg in plan.segments:
        if not isinstance(seg, Straight):
            # The body of a `jax.checkpoint` runs twice in any case.
            twice = runs_twice and isinstance(seg, LayerLoop)
            body = _cut(seg.body, cutters, limit, runs_twice=twice)
            segments.append(dataclasses.replace(seg, body=body))
            continue
        pieces = cutters[seg].pieces(limit)
        if len(pieces) > 1 and runs_twice and _may_run_twice(seg):
            segments.append(_twice(plan, seg, pieces))
        else:
            segments += pieces
    return dataclasses.replace(plan, segments=tuple(segments))


def _may_run_twice(segment: Straight) -> bool:
    """Return whether the equations of a segment may run again, and make all of its outputs."""
    made = {v for eq in segment.equations for v in eq.outputs}
    return made.issuperset(segment.outputs) and not any(eq.is_pinned for eq in segment.equations)


def _twice(plan: FetchPlan, segment: Straight, pieces: Sequence[Straight]) -> Remat:
    """Return the pieces of a segment as one that backward runs a second time."""
    body = FetchPlan(
        leaves=segment.leaves,
        inputs=segment.inputs,
        segments=tuple(pieces),
        outputs=segment.outputs,
        active=plan.active,
        constants=plan.constants.intersection(segment.inputs),
        recoverable=frozenset(segment.inputs),
        units=(segment.leaves,) if segment.leaves else (),
    )
    return Remat(inputs=segment.inputs, outputs=segment.outputs, body=body)


def _cutters(plan: FetchPlan, turns: int) -> Iterator[tuple[Straight, tuple[_Cutter, int]]]:
    """Yield each straight segment with its cutter and the number of its turns."""
    for seg in plan.segments:
        if isinstance(seg, Straight):
            yield seg, (_Cutter(plan, seg), turns)
        else:
            inside = turns * seg.scan.length if isinstance(seg, LayerLoop) else 1
            yield from _cutters(seg.body, inside)


def _bytes_with(pieces: Sequence[tuple[_Piece, int]], limit: float) -> float:
    """Return what crosses all cuts, and the residuals of the largest piece, if pieces are cut down
    to a limit."""
    used = [(cut, turns) for piece, turns in pieces for cut in piece.cuts(limit)]
    largest = max((leaf.weight for piece, _ in pieces for leaf in piece.leaves(limit)), default=0)
    return sum(cut.crossing * turns for cut, turns in used) + OF_RESIDUALS * largest


def _weight(eq: Equation) -> int:
    return 0 if eq.name in RENAMES else sum(map(bytes_of, eq.outputs))


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A run of equations, and how it is cut.

    Attributes:
      start, stop: the equations, by number.
      weight: the bytes that they make.
      crossing: the bytes that cross the best cut.
      parts: the piece on each side of it; none if there is no good one.
    """

    start: int
    stop: int
    weight: int
    crossing: int = 0
    parts: tuple[_Piece, ...] = ()

    def cuts(self, limit: float) -> Iterator[_Piece]:
        """Yield the pieces that are cut if each must make at most `limit` bytes."""
        if self.weight > limit and self.parts:
            yield self
            for part in self.parts:
                yield from part.cuts(limit)

    def leaves(self, limit: float) -> Iterator[_Piece]:
        """Yield the pieces that result."""
        if self.weight > limit and self.parts:
            for part in self.parts:
                yield from part.leaves(limit)
        else:
            yield self


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
        self.last = {v: i for i, eq in enumerate(self.placed) for v in eq.values}
        self.last.update(dict.fromkeys(segment.outputs, len(self.placed)))
        self.whole = self._grown(0, len(self.placed))

    def _leaves_of(self, values: Sequence[Value]) -> frozenset[Value]:
        return frozenset(self.segment.leaves).intersection(closure(values, self.known)[1])

    def pieces(self, limit: float) -> list[Straight]:
        """Return the segment in pieces that make at most `limit` bytes each, if they can be cut."""
        leaves = list(self.whole.leaves(limit))
        if len(leaves) == 1:
            return [self.segment]
        found: list[Straight] = []
        wanted = set(self.segment.outputs)
        for leaf in reversed(leaves):
            is_last = leaf.stop == len(self.placed)
            piece = self._piece(leaf.start, leaf.stop, wanted, is_last=is_last)
            wanted.update(piece.inputs)
            found.append(piece)
        return found[::-1]

    def _grown(self, start: int, stop: int) -> _Piece:
        """Return a run of equations with its best cut, and theirs."""
        equations = self.placed[start:stop]
        total = sum(map(_weight, equations))
        later: dict[Value, int] = {}
        for i, leaves in enumerate(self.leaves[start:stop]):
            later.update(dict.fromkeys(leaves, i))
        best, best_bytes = None, MOST_CROSSING * total
        before = crossing = 0
        until = 0  # the last equation that reads one of the leaves that were read
        ends: dict[int, int] = collections.defaultdict(int)
        for i, eq in enumerate(equations[:-1]):
            before += _weight(eq)
            for v in eq.outputs:
                # A value that is read after the piece lives as long with the cut as without it.
                if (last := self.last.get(v, stop)) < stop:
                    crossing += bytes_of(v)
                    ends[last] += bytes_of(v)
            crossing -= ends[start + i]
            until = max([until, *(later[v] for v in self.leaves[start + i])])
            balanced = LEAST_SHARE * total <= before <= (1 - LEAST_SHARE) * total
            if balanced and until <= i and crossing <= best_bytes:
                best, best_bytes = start + i + 1, crossing
        if best is None:
            return _Piece(start, stop, total)
        parts = self._grown(start, best), self._grown(best, stop)
        return _Piece(start, stop, total, int(best_bytes), parts)

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
