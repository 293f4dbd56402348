"""`source_side`: the minimum cut of a graph, with which programs are divided between two places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Edge = tuple[int, int, float]
"""(from, to, capacity); the capacity is infinite if the edge must not be cut."""

_ALL = 1 << 29
"""Capacity of an edge that must not be cut: more than all other edges together, within 32 bits."""


def source_side(edges: Sequence[Edge], num_nodes: int, *, source: int, sink: int) -> set[int]:
    """Return the nodes on the source's side of a minimum cut. Of several such cuts, take the one
    with the most nodes on the source's side.

    Args:
      edges: the edges. The cut counts those that lead from the source's side to the sink's.
      num_nodes: the number of nodes; they are 0, 1, ...
      source, sink: two nodes.
    """
    # Only this function needs scipy, and it takes a while to import.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    sizes = np.array([size for _, _, size in edges])
    total = sizes[np.isfinite(sizes)].sum()
    units = np.maximum(1, np.minimum(sizes, total) * min(1.0, _ALL / 2 / max(total, 1)))
    units = np.where(np.isfinite(sizes), units, _ALL).astype(np.int64)
    rows, columns = np.array([(a, b) for a, b, _ in edges]).T
    graph = csr_array((units, (rows, columns)), shape=(num_nodes, num_nodes))
    # The sparse array has added up edges that occur several times.
    graph.data = np.minimum(graph.data, _ALL).astype(np.int32)
    left = graph - maximum_flow(graph, source, sink).flow
    left.eliminate_zeros()
    order = breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)
    return set(range(num_nodes)).difference(order.tolist())
