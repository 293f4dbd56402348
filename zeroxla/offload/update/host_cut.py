"""Which equations of a sub-group the host computes: those for which the fewest bytes cross over.

What is offloaded is read where it is, and results are wanted where they live; everything else may
be computed on either side. The cut with the fewest bytes between the sides is a minimum cut: for
Adam gradients go to the host, and what the moments make of them comes back (nothing does where the
master is on the host); for factored moments sums of gradients go, and rows and columns come back.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from zeroxla.offload.update.sub_groups import SubGroup
from zeroxla.program.primitives import ELEMENTWISE
from zeroxla.program.trace import Equation, Program, Value

_LOCAL = ELEMENTWISE | {
    *("broadcast_in_dim", "iota", "slice", "pad", "reshape", "squeeze", "expand_dims"),
    *("transpose", "optimization_barrier"),
}
_ALL = 1 << 29
"""More than all that may cross, in the units of a graph's capacities, which are 32 bits wide."""

_HOST, _DEVICE = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SideRun:
    """Equations of one side that are computed together."""

    on_host: bool
    equations: tuple[Equation, ...]


def joins(eq: Equation) -> bool:
    """Return whether an equation may read other devices' elements: a sum, a product, a loop."""
    return eq.name not in _LOCAL and any(v.aval.shape for v in eq.values)


def stages_of(
    program: Program, group: SubGroup, goes_to_host: Callable[[int], bool]
) -> list[SideRun]:
    """Return the equations of a sub-group in stages, one after another, each of one side.

    An equation that joins elements of several devices counts on the host as if half of what it
    reads crossed over: the devices do it where they have its operands anyway.

    Args:
      program: the update.
      group: of it; its arrays are on the host, what it reads besides is on the devices.
      goes_to_host: of the position of a result: whether its place is the host.
    """
    on_host = _host_side(program, group, goes_to_host)
    makers = {v: eq for eq in group.equations for v in eq.outputs}
    number: dict[Equation, int] = {}
    stages: dict[int, list[Equation]] = defaultdict(list)
    for eq in group.equations:
        side = int(eq in on_host)
        before = [number[makers[v]] for v in eq.values if v in makers]
        # The devices' stages have even numbers.
        number[eq] = max((n + (n % 2 != side) for n in before), default=side)
        stages[number[eq]].append(eq)
    return [SideRun(n % 2 == 1, tuple(stages[n])) for n in sorted(stages)]


def _host_side(
    program: Program, group: SubGroup, goes_to_host: Callable[[int], bool]
) -> frozenset[Equation]:
    """Return the equations on the host's side of the cut."""
    node = {eq: i for i, eq in enumerate(group.equations, start=2)}
    maker = {v: node[eq] for eq in group.equations for v in eq.outputs}
    offloaded = set(group.arrays)
    readers: dict[Value, list[int]] = defaultdict(list)
    edges: list[tuple[int, int, float]] = []  # (from, to, bytes; infinite if it may not be cut)
    for eq in group.equations:
        for v in dict.fromkeys(eq.values):
            if v in offloaded:
                edges.append((_HOST, node[eq], np.inf))
            else:
                readers[v].append(node[eq])
        if joins(eq):
            edges.append((node[eq], _DEVICE, _bytes_of(eq.values) / 2))
    for i in group.results:
        v = program.outputs[i]
        if isinstance(v, Value) and v in maker:
            readers[v].append(_HOST if goes_to_host(i) else _DEVICE)
    # A value crosses once for all that read it on the other side, so one node stands for those.
    free = len(node) + 2
    for v, nodes in readers.items():
        source = maker.get(v, _DEVICE)
        down, up = free, free + 1
        free += 2
        edges += [(source, down, _bytes_of([v])), (up, source, _bytes_of([v]))]
        edges += [(down, n, np.inf) for n in nodes] + [(n, up, np.inf) for n in nodes]
    found = _source_side(edges, free)
    return frozenset(eq for eq, n in node.items() if n in found)


def _source_side(edges: list[tuple[int, int, float]], num_nodes: int) -> set[int]:
    """Return the nodes on the host's side of a minimum cut; of several, of the largest, so that the
    host computes what is as near to it."""
    # It takes a while to import, and only this needs it.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    sizes = np.array([size for _, _, size in edges])
    total = sizes[np.isfinite(sizes)].sum()
    units = np.maximum(1, np.minimum(sizes, total) * min(1.0, _ALL / 2 / max(total, 1)))
    units = np.where(np.isfinite(sizes), units, _ALL).astype(np.int64)
    rows, columns = np.array([(a, b) for a, b, _ in edges]).T
    graph = csr_array((units, (rows, columns)), shape=(num_nodes, num_nodes))
    # Of edges that are there several times the sum.
    graph.data = np.minimum(graph.data, _ALL).astype(np.int32)
    left = graph - maximum_flow(graph, _HOST, _DEVICE).flow
    left.eliminate_zeros()
    order = breadth_first_order(left.T.tocsr(), _DEVICE, return_predecessors=False)
    return set(range(num_nodes)).difference(order.tolist())


def _bytes_of(values: Iterable[Any]) -> float:
    return float(sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 8) for v in set(values)))
