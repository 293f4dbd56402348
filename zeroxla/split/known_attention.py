"""The way to run blockwise attention around a ring, along a split sequence.

The rule of the equation cannot tell of it: its loop goes through blocks of queries and keys. So the
equation is known by the name of its function, by the shapes of its operands, and by the three
arrays that it names for `jax.checkpoint`. Only `models.blockwise` has such a function, or a copy of
it in a model. The ring computes what that function does.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from zeroxla.program import compat
from zeroxla.program.trace import Constant, Equation, Value, bytes_of
from zeroxla.split.atoms import first_run
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, Holding, part
from zeroxla.split.ring import ring_attention
from zeroxla.split.rules import shape_of
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisExchange, Way

BLOCKWISE_ATTENTION = "blockwise_causal_attention"
"""The function of `models.blockwise` with a derivative of its own: (queries [B, L, K, G, H], keys
and values [B, L, K, H], mask [B, L] or nothing, first position, random key or nothing)."""

_NAMED = 3
"""The result, and the largest score and the sum of weights of each query."""

_WIDE = np.dtype(np.float32).itemsize


def ring_way(eq: Equation, flow: DimsFlow, parts: int, costs: AxisCosts) -> Way | None:
    """Return the way to run an equation around a ring; None if it is no attention that can.

    Each device must have two equal runs of positions, all keys must be real or masked ones, and
    there must be no dropout, whose draws are those of blocks.

    Args:
      eq: the equation.
      flow: the flow through its program.
      parts: the length of the axis.
      costs: what conversions and work cost.
    """
    found = _operands(eq)
    if found is None or _num_named(flow, eq) != _NAMED:
        return None
    (q, k, v, *mask), (out,) = found, eq.outputs
    length = shape_of(eq.inputs[q])[1]
    dims = [flow.of_operand(eq.inputs[i])[1] for i in (q, k, v, *mask)]
    atoms = [first_run(dim, parts) for dim in (*dims, flow.dims[out][1])]
    if length % (2 * parts) or None in atoms:
        return None
    held = [part(1, atom) for atom in atoms if atom is not None]
    needs: list[tuple[Holding, ...]] = [(COPIES,)] * len(eq.inputs)
    for i, holding in zip((q, k, v, *mask), held, strict=False):
        needs[i] = (holding,)
    work = sum(map(costs.of_program, flow.bodies[eq]))
    exchange = _exchange(eq, (q, k, v, *mask), parts)
    moved = costs.link * (exchange.forward + exchange.backward)
    return Way(
        tuple(needs),
        (held[-1],),
        classes=frozenset(atom for atom in atoms if atom is not None),
        cost=work / parts + moved + costs.latency * exchange.collectives,
        exchange=exchange,
    )


def _operands(eq: Equation) -> tuple[int, ...] | None:
    """Return the positions of queries, keys, values and, if there is one, the mask; None if the
    equation is not causal attention of a whole sequence without dropout."""
    if compat.custom_rule_name(eq.source) != BLOCKWISE_ATTENTION:
        return None
    ranks = [len(shape_of(x)) for x in eq.inputs]
    if 5 not in ranks:
        return None
    q = ranks.index(5)
    rest = ranks[q:]
    if rest not in ([5, 4, 4, 0], [5, 4, 4, 2, 0]):
        return None  # a random key follows
    start = eq.inputs[-1]
    lengths = {shape_of(x)[1] for x in eq.inputs[q:-1]}
    if not isinstance(start, Constant) or int(start.value) != 0 or len(lengths) != 1:
        return None
    return tuple(range(q, len(ranks) - 1))


def _num_named(flow: DimsFlow, eq: Equation) -> int:
    """Return how many arrays an equation's forward program names as attention's."""
    forward = flow.bodies[eq][0].program
    return sum(x.name == "name" and x.params["name"] == "attention" for x in forward.equations)


def _exchange(eq: Equation, at: Sequence[int], parts: int) -> AxisExchange:
    q, k, v, *mask = (eq.inputs[i] for i in at)
    sizes = [bytes_of(x) for x in (q, k, v) if isinstance(x, Value)]
    keys, results = sum(sizes[1:]) / parts, sum(map(bytes_of, eq.outputs)) / parts
    dealt = sum(sizes) / parts + results
    wide = _WIDE * sum(int(np.prod(shape_of(x))) for x in (k, v)) / parts

    def run(axis: SplitAxis, args: Sequence[jax.Array]) -> list[jax.Array]:
        assert axis.name is not None
        q, k, v, *rest = (args[i] for i in at)
        return [ring_attention(axis.name, axis.parts, q, k, v, rest[0] if rest else None)]

    return AxisExchange(
        name="ring",
        operand=at[1],
        run=run,
        forward=(parts - 1) * keys + dealt,
        backward=(parts - 1) * keys + parts * wide + dealt,
        collectives=2 * 2 * 4 + (parts - 1) * 4 + parts * 2 + (parts - 1) * len(mask),
    )
