"""Windows along a split dim: devices exchange the edges of their parts, the *halo*.

A convolution or a pooling reads, for each place of its result, a window of its operand. If each
device makes its part of the result, the windows at the ends of its part reach into its neighbours'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.primitives import WINDOWS
from zeroxla.program.trace import Equation, Value, bytes_of
from zeroxla.split.atoms import first_run
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, Holding, part
from zeroxla.split.rules import bind, shape_of
from zeroxla.split.split_axis import SplitAxis
from zeroxla.split.ways import AxisExchange, Way


@dataclasses.dataclass(frozen=True, slots=True)
class _Windows:
    """Windows along one dim.

    Attributes:
      operand: the dim's number in the operand.
      result: its number in the result.
      param: its number among the equation's parameters.
      size: the places that a window spans, dilation included.
      stride: the places between the first places of two windows.
      before: the places of padding before the first place.
    """

    operand: int
    result: int
    param: int
    size: int
    stride: int
    before: int

    @property
    def after(self) -> int:
        """How far the last window of a part reaches beyond the part."""
        return self.size - self.before - self.stride

    @property
    def halo(self) -> int:
        """The places that a device receives."""
        return self.before + max(self.after, 0)


def halo_ways(eq: Equation, flow: DimsFlow, parts: int, costs: AxisCosts) -> list[Way]:
    """Return the ways to split an equation along the dims along which windows move.

    A result must have one place for each `stride` places of the operand, and a window must reach
    no further than the next device's part.

    Args:
      eq: the equation.
      flow: the flow through its program.
      parts: the length of the axis.
      costs: what conversions and work cost.
    """
    found = []
    for windows in _along(eq):
        way = _way(eq, flow, windows, parts, costs)
        if way is not None:
            found.append(way)
    return found


def _way(
    eq: Equation, flow: DimsFlow, windows: _Windows, parts: int, costs: AxisCosts
) -> Way | None:
    (x, *others), (out,) = eq.inputs, eq.outputs
    if not isinstance(x, Value) or not out.is_float:
        return None
    size, made = x.aval.shape[windows.operand], out.aval.shape[windows.result]
    atoms = [
        first_run(dim, parts)
        for dim in (flow.dims[x][windows.operand], flow.dims[out][windows.result])
    ]
    no_window = windows.size == windows.stride == 1 and windows.before == 0
    fits = (
        not no_window
        and size == made * windows.stride
        and made % parts == 0
        and 0 <= windows.before < windows.size
    )
    if not fits or max(windows.before, windows.after) > size // parts or None in atoms:
        return None
    of_operand, of_result = (a for a in atoms if a is not None)
    needs: list[tuple[Holding, ...]] = [(part(windows.operand, of_operand),)]
    needs += [(COPIES,)] * len(others)
    received = bytes_of(x) / size * windows.halo

    def run(axis: SplitAxis, args: Sequence[jax.Array]) -> list[jax.Array]:
        first, *rest = args
        return bind(eq, [_with_halo(eq, first, windows, axis), *rest], **_unpadded(eq, windows))

    exchange = AxisExchange(
        name="halo",
        operand=0,
        run=run,
        forward=received,
        backward=received,
        collectives=4 if received else 0,
    )
    moved = 2 * costs.link * received + costs.latency * exchange.collectives
    return Way(
        tuple(needs),
        (part(windows.result, of_result),),
        classes=frozenset((of_operand, of_result)),
        cost=costs.work(eq) / parts + moved,
        exchange=exchange,
    )


def _with_halo(eq: Equation, x: jax.Array, windows: _Windows, axis: SplitAxis) -> jax.Array:
    """Return a device's part with the edges of its neighbours' parts. Beyond the array's own ends
    are the values that padding has."""
    assert axis.name is not None
    d, size, last = windows.operand, x.shape[windows.operand], axis.parts - 1
    beyond, joined = WINDOWS[eq.name], [x]
    following = [(i, (i + 1) % axis.parts) for i in range(axis.parts)]
    if windows.before:
        edge = lax.slice_in_dim(x, size - windows.before, size, axis=d)
        edge = lax.ppermute(edge, axis.name, following)
        joined.insert(0, jnp.where(axis.index == 0, jnp.full_like(edge, beyond), edge))
    if windows.after > 0:
        edge = lax.slice_in_dim(x, 0, windows.after, axis=d)
        edge = lax.ppermute(edge, axis.name, [(b, a) for a, b in following])
        joined.append(jnp.where(axis.index == last, jnp.full_like(edge, beyond), edge))
    return jnp.concatenate(joined, axis=d)


def _unpadded(eq: Equation, windows: _Windows) -> dict[str, object]:
    """Return the parameters of an equation whose operand has its halo."""
    padding = list(eq.params["padding"])
    padding[windows.param] = (0, 0)
    return {"padding": tuple(padding)}


def _along(eq: Equation) -> Iterator[_Windows]:
    """Yield the dims along which an equation's windows move."""
    params = eq.params
    if eq.name == "conv_general_dilated":
        if params["batch_group_count"] != 1:
            return
        numbers, rhs = params["dimension_numbers"], shape_of(eq.inputs[1])
        dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
        for k, (i, j, o) in enumerate(dims):
            size = (rhs[j] - 1) * params["rhs_dilation"][k] + 1
            if params["lhs_dilation"][k] == 1:
                yield _Windows(
                    operand=i,
                    result=o,
                    param=k,
                    size=size,
                    stride=params["window_strides"][k],
                    before=params["padding"][k][0],
                )
    elif eq.name in WINDOWS:
        for k, n in enumerate(params["window_dimensions"]):
            if n > 1 and params["base_dilation"][k] == 1:
                yield _Windows(
                    operand=k,
                    result=k,
                    param=k,
                    size=(n - 1) * params["window_dilation"][k] + 1,
                    stride=params["window_strides"][k],
                    before=params["padding"][k][0],
                )
