"""Shifts along a split dim: each device sends the edge of its part to a neighbour.

A shift is a `pad` that adds as many elements at one end as it drops at the other. What a shift
drops and what it adds are at the ends of the whole array.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Equation, Value, bytes_of
from zeroxla.split.atoms import first_run
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, part
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisExchange, Way


def shift_ways(eq: Equation, flow: DimsFlow, parts: int, costs: AxisCosts) -> list[Way]:
    """Return the way to split a shift along the dim that it moves along, in a list; none if the
    equation is no shift, or moves elements further than to the next device.

    Args:
      eq: a `pad`.
      flow: the flow through its program.
      parts: the length of the axis.
      costs: what conversions and work cost.
    """
    x, (out,) = eq.inputs[0], eq.outputs
    configs = eq.params["padding_config"]
    moved = [d for d, each in enumerate(configs) if any(each)]
    if len(moved) != 1 or not isinstance(x, Value):
        return []
    (d,) = moved
    by, back, inside = map(int, configs[d])
    size = x.aval.shape[d]
    atoms = [first_run(dims[d], parts) for dims in (flow.dims[x], flow.dims[out])]
    of_operand, of_result = atoms
    if inside or by + back or of_operand is None or of_result is None or abs(by) > size // parts:
        return []
    received = bytes_of(x) / size * abs(by)

    def run(axis: SplitAxis, args: Sequence[jax.Array]) -> list[jax.Array]:
        return [_shifted(args[0], args[1], d, by, axis)]

    has_gradient = flow.has_gradient(out)
    exchange = AxisExchange(
        name="shift",
        operand=0,
        run=run,
        forward=received,
        backward=received,
        collectives=2 if has_gradient else 1,
    )
    moves = costs.link * received * exchange.collectives + costs.latency * exchange.collectives
    way = Way(
        ((part(d, of_operand),), (COPIES,)),
        (part(d, of_result),),
        classes=frozenset((of_operand, of_result)),
        cost=costs.work(eq) / parts + moves,
        exchange=exchange,
    )
    return [way]


def _shifted(x: jax.Array, fill: jax.Array, d: int, by: int, axis: SplitAxis) -> jax.Array:
    """Return this device's part of an array whose elements are moved `by` places."""
    assert axis.name is not None
    size, num = x.shape[d], axis.parts
    start, end = (size - by, size) if by > 0 else (0, -by)
    sent = lax.slice_in_dim(x, start, end, axis=d)
    kept = (
        lax.slice_in_dim(x, 0, start, axis=d) if by > 0 else lax.slice_in_dim(x, end, size, axis=d)
    )
    step = 1 if by > 0 else -1
    received = lax.ppermute(sent, axis.name, [(i, (i + step) % num) for i in range(num)])
    is_end = axis.index == (0 if by > 0 else num - 1)
    edge = jnp.where(is_end, jnp.full_like(received, fill), received)
    return jnp.concatenate([edge, kept] if by > 0 else [kept, edge], axis=d)
