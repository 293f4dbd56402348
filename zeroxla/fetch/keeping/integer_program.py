"""Integer programs, solved by HiGHS: the best choice for one segment under a limit of bytes, or for
several small ones together, and the best combination of choices for many."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from zeroxla.fetch.keeping.residual_graph import ResidualGraph
from zeroxla.fetch.keeping.tradeoff import SegmentChoice

MAX_NODES = 2000
"""Most nodes of the search for integers. A limit of time would give each process another answer."""
MAX_EQUATIONS = 400
"""Larger segments have no exact solution."""
MAX_EQUATIONS_TOGETHER = 60
"""Segments that have more equations together have no exact solution together."""


def best_choice(graph: ResidualGraph, limit: float) -> SegmentChoice | None:
    """Return the choice of the least seconds that keeps at most `limit` bytes on the device.

    Args:
      graph: the segment's graph.
      limit: bytes.

    Returns:
      The choice; None if no choice fits, if none was found, or if the segment is too large to ask.
    """
    if len(graph.seconds) > MAX_EQUATIONS:
        return None
    columns = _Columns(graph, 0)
    kept = [(dict(columns.kept_bytes()), limit)]
    found = _solved([columns], [1.0], kept)
    if found is None or found[0].num_bytes > limit * (1 + 1e-9):
        return None
    return found[0]


def best_together(
    graphs: Sequence[ResidualGraph], turns: Sequence[int], alive: np.ndarray, limit: float
) -> list[SegmentChoice] | None:
    """Choose for several segments, exactly, under a limit of bytes at several moments.

    Args:
      graphs: the graph of each segment.
      turns: how often each runs.
      alive: shape [segments, segments]: how many times what a segment keeps, a column, is there
        while backward is at another, a row, besides what is there of that one itself.
      limit: the bytes that there may be at each moment.

    Returns:
      The choices of the least seconds; None if nothing fits, if nothing was found, or if the
      segments are too large to ask.
    """
    if sum(len(graph.seconds) for graph in graphs) > MAX_EQUATIONS_TOGETHER:
        return None
    columns: list[_Columns] = []
    for graph in graphs:
        columns.append(_Columns(graph, columns[-1].stop if columns else 0))
    limits = []
    for i, own in enumerate(columns):
        row = dict(own.bytes_in_backward())
        for j, other in enumerate(columns):
            for column, size in other.kept_bytes():
                row[column] = row.get(column, 0.0) + alive[i, j] * size
        limits.append((row, limit))
    return _solved(columns, turns, limits)


class _Columns:
    """The columns and rows of one segment: a value is needed, kept, kept on the host, there while
    the segment runs backward, and in memory by itself then; an equation runs; a leaf is gathered.

    Args:
      graph: the segment's graph.
      start: the number of the first column.
    """

    def __init__(self, graph: ResidualGraph, start: int) -> None:
        self.graph = graph
        num_values = len(graph.values)
        self.start = self.need = start
        self.keep, self.away, self.there, self.alone = (start + i * num_values for i in range(1, 5))
        self.run = start + 5 * num_values
        self.gather = self.run + len(graph.seconds)
        self.stop = self.gather + len(graph.gather_seconds)

    def kept_bytes(self) -> Iterator[tuple[int, float]]:
        """Yield the columns that keep a value on the device, with its bytes."""
        return ((self.keep + v, float(size)) for v, size in enumerate(self.graph.bytes))

    def bytes_in_backward(self) -> Iterator[tuple[int, float]]:
        """Yield the columns that make up `ResidualGraph.bytes_in_backward`."""
        return ((self.alone + v, float(size)) for v, size in enumerate(self.graph.bytes))

    def costs(self) -> np.ndarray:
        """Return the seconds of each column."""
        graph, seconds = self.graph, np.zeros(self.stop - self.start)
        host, first = np.array(graph.host_seconds), self.away - self.start
        seconds[first : first + len(host)] = np.where(np.isfinite(host), host, 0.0)
        run, gather = self.run - self.start, self.gather - self.start
        seconds[run:gather] = graph.seconds
        seconds[gather:] = graph.gather_seconds
        return seconds

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the most of each column."""
        lower, upper = np.zeros(self.stop - self.start), np.ones(self.stop - self.start)
        for first in (self.need, self.there):
            lower[[first - self.start + v for v in self.graph.residuals]] = 1.0
        away = self.away - self.start
        upper[away : away + len(self.graph.values)] = np.isfinite(self.graph.host_seconds)
        return lower, upper

    def rows(self) -> Iterator[tuple[dict[int, float], float]]:
        """Yield each rule, as factors of columns and what their sum must reach."""
        graph = self.graph
        for v, eq in enumerate(graph.maker):
            made = {self.run + eq: 1.0} if eq >= 0 else {}
            yield {self.keep + v: 1.0, self.away + v: 1.0, self.need + v: -1.0, **made}, 0.0
            yield {self.there + v: 1.0, self.keep + v: -1.0}, 0.0
            if eq >= 0 and graph.renames[eq]:
                first = graph.reads[eq][0]
                yield {self.there + first: 1.0, self.there + v: -1.0}, 0.0
                continue
            passed = made if eq >= 0 and graph.fused[eq] else {}
            yield {self.alone + v: 1.0, self.there + v: -1.0, **passed}, 0.0
            if passed:
                for read in graph.reads[eq]:
                    row = {self.there + read: 1.0, self.there + v: -1.0, self.run + eq: -1.0}
                    yield row, -1.0
        for e, reads in enumerate(graph.reads):
            for v in reads:
                yield {self.need + v: 1.0, self.run + e: -1.0}, 0.0
            for w in graph.gathers[e]:
                yield {self.gather + w: 1.0, self.run + e: -1.0}, 0.0

    def choice(self, chosen: np.ndarray) -> SegmentChoice:
        """Return the choice that a solution stands for."""
        again = np.flatnonzero(chosen[self.run : self.gather]).tolist()
        on_host = np.flatnonzero(chosen[self.away : self.there]).tolist()
        return SegmentChoice.of(self.graph, frozenset(again), on_host)


def _solved(
    columns: Sequence[_Columns],
    turns: Sequence[float],
    limits: Sequence[tuple[dict[int, float], float]],
) -> list[SegmentChoice] | None:
    """Return the choices of the least seconds, given how many bytes each row may add up to."""
    from scipy.optimize import LinearConstraint, milp

    num_columns = columns[-1].stop
    seconds = np.concatenate([c.costs() * n for c, n in zip(columns, turns, strict=True)])
    unit = max(float(seconds.max(initial=0.0)), 1e-30)
    scale = max(sum(float(sum(c.graph.bytes)) for c in columns), 1.0)
    rules = [rule for c in columns for rule in c.rows()]
    least: Any = np.array([value for _, value in rules])
    most: Any = np.array([limit for _, limit in limits]) / scale
    lower, upper = (np.concatenate(x) for x in zip(*(c.bounds() for c in columns), strict=True))
    # Without the second term, values that cost nothing would be kept although nobody needs them.
    tie_break = np.zeros(num_columns)
    for c in columns:
        tie_break[c.keep : c.away] = np.array(c.graph.bytes) / scale
    solved = milp(
        seconds / unit + 1e-9 * tie_break,
        constraints=[
            LinearConstraint(_matrix([row for row, _ in rules], num_columns), least, np.inf),
            LinearConstraint(_matrix([row for row, _ in limits], num_columns) / scale, ub=most),
        ],
        bounds=(lower, upper),
        integrality=np.ones(num_columns),
        options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-6},
    )
    if solved.x is None:
        return None
    return [c.choice(solved.x > 0.5) for c in columns]


def _matrix(rows: Sequence[dict[int, float]], num_columns: int) -> Any:
    """Return rows of factors by column as a sparse matrix."""
    from scipy.sparse import coo_array

    entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
    i, j, x = zip(*entries, strict=True)
    return coo_array((x, (i, j)), shape=(len(rows), num_columns)).tocsr()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostTraffic:
    """What moving values to the host and back costs.

    Attributes:
      num_bytes: for each item, the bytes of each possibility.
      hidden: the bytes whose way runs beside computation.
      seconds_per_byte: the seconds of each byte above.
    """

    num_bytes: Sequence[Sequence[float]]
    hidden: float
    seconds_per_byte: float


def best_combination(
    seconds: Sequence[Sequence[float]],
    num_bytes: Sequence[Sequence[float]],
    own_bytes: Sequence[Sequence[float]],
    alive: np.ndarray,
    limit: float,
    host: HostTraffic,
) -> tuple[list[int], float] | None:
    """Choose one of several possibilities for each item, under a limit of bytes at several moments.

    Args:
      seconds: for each item, the seconds of each possibility.
      num_bytes: for each item, the bytes of each possibility.
      own_bytes: for each item, the bytes besides at its own moment.
      alive: shape [items, items]: how many times an item's bytes, a column, are there at another's
        moment, a row.
      limit: the bytes that there may be at each moment.
      host: the bytes that wait on the host.

    Returns:
      The number of each item's possibility, and the share by which the seconds may exceed the least
      ones; None if nothing fits.
    """
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array, hstack

    owner = np.repeat(np.arange(len(seconds)), [len(s) for s in seconds])
    costs, sizes, own, moved = (
        np.concatenate([np.asarray(x, float) for x in each])
        for each in (seconds, num_bytes, own_bytes, host.num_bytes)
    )
    unit_s, unit_b = max(float(costs.max()), 1e-30), max(float(max(sizes.max(), moved.max())), 1.0)
    is_own = np.arange(len(seconds))[:, None] == owner
    at_moments = (alive[:, owner] * sizes + is_own * own) / unit_b
    none = csr_array((len(seconds), 1))
    # The last column: the bytes whose way to the host is not hidden.
    late = np.append(-moved / unit_b, 1.0)[None]
    solved = milp(
        np.append(costs / unit_s + 1e-7 * moved / unit_b, host.seconds_per_byte * unit_b / unit_s),
        constraints=[
            LinearConstraint(hstack([csr_array(is_own.astype(float)), none]), 1.0, 1.0),
            LinearConstraint(hstack([csr_array(at_moments), none]), -np.inf, limit / unit_b),
            LinearConstraint(late, -host.hidden / unit_b, np.inf),
        ],
        bounds=(0.0, np.append(np.ones(len(owner)), np.inf)),
        integrality=np.append(np.ones(len(owner)), 0.0),
        options={"node_limit": MAX_NODES, "mip_rel_gap": 5e-3},
    )
    if solved.x is None:
        return None
    starts = np.cumsum([0, *(len(s) for s in seconds)])
    picked = [int(np.argmax(solved.x[a:b])) for a, b in itertools.pairwise(starts)]
    return picked, float(solved.mip_gap or 0.0)
