"""`side_runs`: divides a sub-group's equations between host and device, so that the fewest bytes
cross over.

Offloaded arrays are read on the host, and each result is needed where it lives. All other values
may be computed on either side. The division with the fewest bytes between the sides is a minimum
cut. With Adam, gradients go to the host and the moments' quotient comes back, or nothing if the
master is on the host too. With factored moments, sums of gradients go and rows and columns come
back.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from zeroxla.offload.update.sub_groups import SubGroup
from zeroxla.program.min_cut import Edge, source_side
from zeroxla.program.primitives import LOCAL
from zeroxla.program.trace import Equation, Program, Value

_HOST, _DEVICE = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SideRun:
    """Equations that are computed together on one side.

    Attributes:
      on_host: whether the side is the host; otherwise it is the device.
      equations: the equations, in order.
    """

    on_host: bool
    equations: tuple[Equation, ...]


def joins(eq: Equation) -> bool:
    """Return whether an equation may combine elements of several devices, as sums, products and
    loops do."""
    return eq.name not in LOCAL and any(v.aval.shape for v in eq.values)


def side_runs(
    program: Program, group: SubGroup, goes_to_host: Callable[[int], bool]
) -> list[SideRun]:
    """Return a sub-group's equations as runs, to be computed one after another, each on one side.

    An equation that combines elements of several devices counts on the host as if half of its
    operands' bytes crossed over. So the devices compute it if they have its operands anyway.

    Args:
      program: the update.
      group: one of its sub-groups. Its arrays are on the host, its `reads` on the devices.
      goes_to_host: tells, for the position of a result, whether the result lives on the host.
    """
    on_host = _host_side(program, group, goes_to_host)
    makers = {v: eq for eq in group.equations for v in eq.outputs}
    number: dict[Equation, int] = {}
    runs: dict[int, list[Equation]] = defaultdict(list)
    for eq in group.equations:
        side = int(eq in on_host)
        before = [number[makers[v]] for v in eq.values if v in makers]
        # Runs on the devices have even numbers, runs on the host odd ones.
        number[eq] = max((n + (n % 2 != side) for n in before), default=side)
        runs[number[eq]].append(eq)
    return [SideRun(n % 2 == 1, tuple(runs[n])) for n in sorted(runs)]


def _host_side(
    program: Program, group: SubGroup, goes_to_host: Callable[[int], bool]
) -> frozenset[Equation]:
    """Return the equations that the minimum cut leaves on the host's side."""
    node = {eq: i for i, eq in enumerate(group.equations, start=2)}
    maker = {v: node[eq] for eq in group.equations for v in eq.outputs}
    offloaded = set(group.arrays)
    readers: dict[Value, list[int]] = defaultdict(list)
    edges: list[Edge] = []
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
    # A value crosses over once for all its readers on the other side: one node stands for them.
    free = len(node) + 2
    for v, nodes in readers.items():
        source = maker.get(v, _DEVICE)
        down, up = free, free + 1
        free += 2
        edges += [(source, down, _bytes_of([v])), (up, source, _bytes_of([v]))]
        edges += [(down, n, np.inf) for n in nodes] + [(n, up, np.inf) for n in nodes]
    found = source_side(edges, free, source=_HOST, sink=_DEVICE)
    return frozenset(eq for eq, n in node.items() if n in found)


def _bytes_of(values: Iterable[Any]) -> float:
    return float(sum(v.aval.size * getattr(v.aval.dtype, "itemsize", 8) for v in set(values)))
