"""The conversions of a plan: where an array changes its holding, in which order, how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from zeroxla.program.scan import Scan
from zeroxla.program.trace import Constant, Equation, Value, bytes_of
from zeroxla.split.holdings import COPIES, WHOLE, Holding, cheapest, moved_share
from zeroxla.split.ways import AxisExchange, AxisPlan, Way

MOVES = {
    ("part", "whole"): "all-gather",
    ("part", "copies"): "all-gather",
    ("part", "part"): "all-to-all",
    ("part", "summands"): None,
    ("summands", "whole"): "all-reduce",
    ("summands", "copies"): "all-reduce",
    ("summands", "part"): "reduce-scatter",
    ("summands", "ragged"): "all-reduce",
    ("part", "ragged"): "all-gather",
    ("ragged", "whole"): "all-reduce",
    ("ragged", "copies"): "all-reduce",
    ("ragged", "part"): "reduce-scatter",
    ("ragged", "ragged"): "all-reduce",
}
"""The collective of a conversion, by the kinds of holdings; those that are not here have none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """An array that changes its holding.

    Attributes:
      shape: the shape of the whole array.
      dtype: its dtype.
      num_bytes: its bytes.
      have, want: the holdings before and after.
      where: the named scope of the equation that needs it; "the end" for results.
      times: how often it happens in a step's forward; more than once in a loop.
      has_gradient: whether backward makes its transpose.
      exchange: what an equation does with it while it computes; None for a change of holdings.
      in_backward: whether it happens in the backward program of a derivative of the model's own.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    have: Holding
    want: Holding
    where: str
    times: int
    has_gradient: bool
    exchange: AxisExchange | None = None
    in_backward: bool = False

    @property
    def forward(self) -> str | None:
        """The collective in forward; None if nothing travels."""
        if self.exchange is not None:
            return self.exchange.name if self.exchange.forward else None
        return _collective(self.have, self.want)

    @property
    def backward(self) -> str | None:
        """The collective in backward; None if nothing travels."""
        if not self.has_gradient:
            return None
        if self.exchange is not None:
            return self.exchange.name if self.exchange.backward else None
        return _collective(self.want.dual, self.have.dual)

    def received(self, parts: int) -> tuple[float, float]:
        """Return the bytes that a device receives in forward and in backward, all turns
        together."""
        if self.exchange is not None:
            back = self.exchange.backward if self.has_gradient else 0.0
            return self.times * self.exchange.forward, self.times * back
        back = moved_share(self.want.dual, self.have.dual, parts) if self.has_gradient else 0.0
        there = moved_share(self.have, self.want, parts)
        return self.times * self.num_bytes * there, self.times * self.num_bytes * back


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RanEquation:
    """An equation that a plan runs.

    Attributes:
      plan: the plan, of the whole program or of a body.
      equation, way: the equation and its way.
      times: how often it runs in a step's forward.
      inside: the equations in whose bodies it is, the outermost first, each with its way.
      in_backward: as for `Conversion`.
    """

    plan: AxisPlan
    equation: Equation
    way: Way
    times: int
    inside: tuple[tuple[Equation, Way], ...]
    in_backward: bool


def conversions_of(plan: AxisPlan, parts: int) -> Iterator[Conversion]:
    """Yield the conversions of a plan, in order, as `PlanRunner` makes them.

    Args:
      plan: the plan.
      parts: the length of the axis.
    """
    return (x for x in events_of(plan, parts) if isinstance(x, Conversion))


def events_of(
    plan: AxisPlan,
    parts: int,
    times: int = 1,
    inside: tuple[tuple[Equation, Way], ...] = (),
    *,
    in_backward: bool = False,
) -> Iterator[Conversion | RanEquation]:
    """Yield the conversions and the equations of a plan, in order.

    An equation follows the conversions of its operands and the events of its bodies; those of its
    results follow it.

    Args:
      plan: the plan.
      parts: the length of the axis.
      times: how often the plan runs.
      inside: the equations in whose bodies the plan runs.
      in_backward: whether it runs in backward.
    """
    held = {v: set(given) for v, given in zip(plan.program.inputs, plan.inputs, strict=True)}

    def read(operand: object, want: Holding, where: str) -> Iterator[Conversion]:
        if not isinstance(operand, Value) or want in held[operand]:
            return
        of_leaf = plan.flow.made_of_leaves(operand)
        first = COPIES
        has_gradient = plan.flow.has_gradient(operand)
        if not (of_leaf and COPIES in held[operand]):
            _, first = cheapest(held[operand], want, parts, has_gradient=has_gradient)
        held[operand].add(want)
        yield _conversion(
            operand,
            first,
            want,
            where=where,
            times=times,
            has_gradient=has_gradient,
            in_backward=in_backward,
        )

    for eq, way in plan.steps:
        if eq.name == "optimization_barrier":
            for x, v in zip(eq.inputs, eq.outputs, strict=True):
                held[v] = {WHOLE} if isinstance(x, Constant) else set(held[x])
            continue
        for operand, wants in zip(eq.inputs, way.needs, strict=True):
            for want in wants:
                yield from read(operand, want, _scope(eq))
        if way.exchange is not None:
            exchanged = _exchanged(plan, eq, way, way.exchange, times)
            yield dataclasses.replace(exchanged, in_backward=in_backward)
        for body in (way.body, way.backward):
            if body is not None:
                turns = Scan(eq).length if eq.name == "scan" else 1
                back = in_backward or body is way.backward
                within = (*inside, (eq, way))
                yield from events_of(body, parts, times * turns, within, in_backward=back)
        yield RanEquation(
            plan=plan, equation=eq, way=way, times=times, inside=inside, in_backward=in_backward
        )
        for v, gives in zip(eq.outputs, way.gives, strict=True):
            held[v] = {gives}
        for v, kept in zip(eq.outputs, way.keeps, strict=False):
            yield from read(v, kept, _scope(eq))
            held[v] = {kept}
    for operand, want in zip(plan.program.outputs, plan.outputs, strict=True):
        yield from read(operand, want, "the end")


def _conversion(value: Value, have: Holding, want: Holding, **rest: Any) -> Conversion:
    return Conversion(
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        num_bytes=bytes_of(value),
        have=have,
        want=want,
        **rest,
    )


def _exchanged(
    plan: AxisPlan, eq: Equation, way: Way, exchange: AxisExchange, times: int
) -> Conversion:
    """Return what an equation exchanges while it computes."""
    value, (held,) = eq.inputs[exchange.operand], way.needs[exchange.operand]
    assert isinstance(value, Value)
    return _conversion(
        value,
        held,
        held,
        where=_scope(eq),
        times=times,
        has_gradient=any(plan.flow.has_gradient(v) for v in eq.outputs),
        exchange=exchange,
    )


def _collective(have: Holding, want: Holding) -> str | None:
    if have == want:
        return None
    if have.atom is not None and want.atom is not None and have.dim == want.dim:
        return "all-gather"  # along another class of the same dim
    return MOVES.get((have.kind.value, want.kind.value))


def _scope(eq: Equation) -> str:
    return "/".join(filter(None, (str(eq.name_stack), eq.name)))
