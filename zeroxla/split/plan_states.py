"""Where a search for a plan is: what exists in which holdings, and what it has cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from zeroxla.program.trace import Constant, Equation, Operand, Value
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import COPIES, WHOLE, Holding, Kind
from zeroxla.split.ways import AxisPlan, Way

Held = dict[Value, frozenset[Holding]]
Trace = tuple[Equation, Way, "Trace"] | None
Read = tuple[Value, frozenset[Holding], "Read"] | None


@dataclasses.dataclass(slots=True)
class PlanState:
    """Where a search is.

    Attributes:
      held: the holdings in which each value exists that is still read.
      cost: what it has cost, in seconds.
      bought: the part of it that inputs have cost.
      trace: the ways taken so far.
      read: the inputs that are not read any more, in what they were held.
    """

    held: Held
    cost: float = 0.0
    bought: float = 0.0
    trace: Trace = None
    read: Read = None

    def drop(self, value: Value, *, is_input: bool) -> None:
        """Forget a value that is not read any more."""
        held = self.held.pop(value, None)
        if is_input and held is not None:
            self.read = (value, held, self.read)

    def inputs(self) -> Held:
        """Return in what every value is or was held that is an input."""
        found, read = dict(self.held), self.read
        while read is not None:
            value, found[value], read = read
        return found


def bring(states: Iterable[PlanState], waiting: Held, read: Iterable[Operand]) -> None:
    """Add the inputs to states that are read now for the first time.

    Args:
      states: the states, which are changed.
      waiting: the inputs that have not been read, with their holdings; those added are removed.
      read: what is read now.
    """
    met = [v for v in dict.fromkeys(read) if isinstance(v, Value) and v in waiting]
    new = {v: waiting.pop(v) for v in met}
    for state in states:
        state.held.update(new)


def passed(state: PlanState, eq: Equation) -> PlanState:
    """Return the state after a barrier, which passes on every holding."""
    held = dict(state.held)
    for x, v in zip(eq.inputs, eq.outputs, strict=True):
        held[v] = frozenset((WHOLE,)) if isinstance(x, Constant) else held[x]
    return dataclasses.replace(state, held=held, trace=(eq, _BARRIER, state.trace))


_BARRIER = Way((), ())


def given_as(body: DimsFlow, held: Held, value: Value) -> tuple[Holding, ...]:
    """Return the holdings in which a body is given an input."""
    given = frozenset(h for h in held[value] if h.kind is not Kind.RAGGED)
    if body.made_of_leaves(value):
        return of_leaf(given)
    return tuple(sorted(given, key=preference))


def of_leaf(holdings: frozenset[Holding]) -> tuple[Holding, ...]:
    """Return the one holding of a leaf of which some are needed: copies, if there are several."""
    return tuple(holdings) if len(holdings) == 1 else (COPIES,)


def plan_of(
    flow: DimsFlow,
    state: PlanState,
    outputs: Sequence[Holding],
    inputs: Sequence[tuple[Holding, ...]],
) -> AxisPlan:
    """Return the plan that a search has ended with."""
    steps, trace = [], state.trace
    while trace is not None:
        eq, way, trace = trace
        steps.append((eq, way))
    return AxisPlan(
        flow.program,
        flow,
        tuple(reversed(steps)),
        tuple(inputs),
        tuple(outputs),
        state.cost - state.bought,
    )


def preference(holding: Holding) -> tuple[int, int]:
    """Return a key by which holdings are sorted: the cheapest to store first."""
    order = (Kind.PART, Kind.WHOLE, Kind.SUMMANDS, Kind.COPIES, Kind.RAGGED)
    return order.index(holding.kind), -1 if holding.dim is None else holding.dim
