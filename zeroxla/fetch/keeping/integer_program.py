"""Integer programs, solved by HiGHS: the best choice for one segment under a limit of bytes, and
the best combination of choices for several."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from zeroxla.fetch.keeping.residual_graph import ResidualGraph
from zeroxla.fetch.keeping.tradeoff import Choice

MAX_NODES = 2000
"""Most nodes of the search for integers. A limit of time would give each process another answer."""
MAX_EQUATIONS = 400
"""Larger segments have no exact solution."""


def best_choice(graph: ResidualGraph, limit: float) -> Choice | None:
    """Return the choice of the least seconds that keeps at most `limit` bytes on the device.

    Args:
      graph: the segment's graph.
      limit: bytes.

    Returns:
      The choice; None if no choice fits, if none was found, or if the segment is too large to ask.
    """
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import coo_array

    num_values, num_equations = len(graph.values), len(graph.seconds)
    if num_equations > MAX_EQUATIONS:
        return None
    sizes = np.array(graph.bytes, float)
    host = np.array(graph.host_seconds)
    can_host = np.isfinite(host)
    # Columns: a value is needed, kept, or kept on the host; an equation runs; a leaf is gathered.
    need, keep, away = 0, num_values, 2 * num_values
    run = 3 * num_values
    gather = run + num_equations
    num_columns = gather + len(graph.gather_seconds)
    rows: list[dict[int, float]] = []  # each: sum of factor * column >= 0
    for v, eq in enumerate(graph.maker):
        made = {run + eq: 1.0} if eq >= 0 else {}
        rows.append({keep + v: 1.0, away + v: 1.0, need + v: -1.0, **made})
    for e, reads in enumerate(graph.reads):
        rows += [{need + v: 1.0, run + e: -1.0} for v in reads]
        rows += [{gather + w: 1.0, run + e: -1.0} for w in graph.gathers[e]]
    seconds = np.zeros(num_columns)
    seconds[away : away + num_values] = np.where(can_host, host, 0.0)
    seconds[run : run + num_equations] = graph.seconds
    seconds[gather:] = graph.gather_seconds
    unit = max(float(seconds.max()), 1e-30)
    lower, upper = np.zeros(num_columns), np.ones(num_columns)
    lower[[need + v for v in graph.residuals]] = 1.0
    upper[away : away + num_values] = can_host
    entries = [(i, j, x) for i, row in enumerate(rows) for j, x in row.items()]
    i, j, x = zip(*entries, strict=True)
    logic = coo_array((x, (i, j)), shape=(len(rows), num_columns)).tocsr()
    bytes_row = np.zeros((1, num_columns))
    scale = max(float(sizes.sum()), 1.0)
    bytes_row[0, keep : keep + num_values] = sizes / scale
    # Without the second term, values that cost nothing would be kept although nobody needs them.
    solved = milp(
        seconds / unit + 1e-9 * bytes_row[0],
        constraints=[
            LinearConstraint(logic, 0.0, np.inf),
            LinearConstraint(bytes_row, -np.inf, limit / scale),
        ],
        bounds=(lower, upper),
        integrality=np.ones(num_columns),
        options={"node_limit": MAX_NODES, "mip_rel_gap": 1e-6},
    )
    if solved.x is None:
        return None
    chosen = solved.x > 0.5
    again = frozenset(np.flatnonzero(chosen[run : run + num_equations]).tolist())
    on_host = np.flatnonzero(chosen[away : away + num_values]).tolist()
    choice = Choice.of(graph, again, on_host)
    return choice if choice.num_bytes <= limit * (1 + 1e-9) else None


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
