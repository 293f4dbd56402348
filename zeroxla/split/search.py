"""Searches for the cheapest way to run a program on an axis.

The equations are taken in order. A state of the search says in which holdings each value exists
that is still to be read, and what it has cost so far. An equation takes each state further by each
of its ways: operands are converted where they do not exist as needed, from the holding that is
cheapest to convert, and stay in both. Of states that hold the same, the cheapest stays. As few
values are alive between two blocks of a model, this is dynamic programming; if there are more than
`WIDTH` states, the dearest are dropped.

The body of a loop is searched once for each holding that its carry can have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zeroxla.program.primitives import (
    ARRANGEMENTS,
    CUSTOM_RULES,
    ELEMENTWISE,
    REDUCTIONS,
    REMATS,
)
from zeroxla.program.trace import Constant, Equation, Value, bytes_of
from zeroxla.split.atoms import Atom, atoms_in
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.axis_roles import AxisRole, is_matrix
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.holdings import (
    COPIES,
    SUMMANDS,
    WHOLE,
    Holding,
    Kind,
    cheapest,
    num_moves,
)
from zeroxla.split.inner_ways import loop_ways, remat_ways, rule_ways
from zeroxla.split.ways import AxisPlan, Way, ways_of

WIDTH = 128
"""The most states that are followed."""

DEBUG = False
LEADERS = 16
"""The cheapest states, with which others are compared."""

FOLLOWERS = ELEMENTWISE | ARRANGEMENTS | REDUCTIONS
"""Equations that do not convert their largest operand if they need not."""

Held = dict[Value, frozenset[Holding]]
Trace = tuple[Equation, Way, "Trace"] | None
Read = tuple[Value, frozenset[Holding], "Read"] | None


@dataclasses.dataclass(slots=True)
class _State:
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """Searches for plans on one axis.

    Attributes:
      parts: the length of the axis.
      role: what may be split along the axis.
      costs: what conversions and work cost.
    """

    parts: int
    role: AxisRole
    costs: AxisCosts

    def plan(
        self, flow: DimsFlow, num_leaves: int, known: Sequence[Holding] | None = None
    ) -> AxisPlan:
        """Return the cheapest plan of a whole program.

        Args:
          flow: the flow through the program; its first inputs are leaves.
          num_leaves: the number of leaves.
          known: the holdings of the leaves, if they are decided.
        """
        inputs = flow.program.inputs
        leaves = inputs[:num_leaves]
        held: Held = dict.fromkeys(leaves, frozenset())
        if known is not None:
            held.update((v, frozenset((h,))) for v, h in zip(leaves, known, strict=True))
        held.update(dict.fromkeys(inputs[num_leaves:], frozenset((WHOLE,))))
        outputs = [(WHOLE,)] * len(flow.program.outputs)
        sources = frozenset(leaves if known is None else ())
        states = self._run(flow, [_State(held)], sources)
        end = self._end(flow, states, outputs, sources)
        assert end is not None, "everything can run whole"
        state, wanted = end
        held = state.inputs()
        given = [_of_leaf(held[v]) for v in leaves]
        if known is not None:
            given = [(h,) for h in known]
        given += [(WHOLE,)] * (len(inputs) - num_leaves)
        return _plan(flow, state, wanted, given)

    def along(self, atom: Atom) -> Search:
        """Return the search in which nothing but one class is split."""
        return dataclasses.replace(self, role=dataclasses.replace(self.role, only=atom))

    def inner(
        self,
        body: DimsFlow,
        given: Mapping[Value, Holding],
        chosen: Sequence[Value],
        outputs: Sequence[Sequence[Holding]],
    ) -> AxisPlan | None:
        """Return the cheapest plan of a body; None if there is none.

        Args:
          body: the flow through it.
          given: the inputs whose holdings are decided.
          chosen: the other inputs.
          outputs: the holdings that each result may have; any, if there are none.
        """
        held: Held = {v: frozenset((h,)) for v, h in given.items()}
        held.update(dict.fromkeys(chosen, frozenset()))
        sources = frozenset(chosen)
        states = self._run(body, [_State(held)], sources)
        if not states:
            return None
        end = self._end(body, states, outputs, sources)
        if end is None:
            return None
        state, wanted = end
        known = state.inputs()
        inputs = [
            (given[v],) if v in given else _given(body, known, v) for v in body.program.inputs
        ]
        return _plan(body, state, wanted, inputs)

    def _run(
        self, flow: DimsFlow, states: list[_State], sources: frozenset[Value]
    ) -> list[_State]:
        """Take states through the equations of a program.

        Args:
          flow: the flow through the program.
          states: the states before the first equation.
          sources: the inputs whose holdings are chosen when they are first read.
        """
        program = flow.program
        kept = {x for x in program.outputs if isinstance(x, Value)}
        inputs = frozenset(program.inputs)
        last = {v: eq for eq in program.equations for v in eq.values}
        for eq in program.equations:
            if eq.name == "optimization_barrier":
                states = [_passed(state, eq) for state in states]
            else:
                ways = self._ways(flow, eq)
                place = _largest(eq) if eq.name in FOLLOWERS else None
                states = [
                    new
                    for state in states
                    for way in self._following(flow, state, eq, ways, place)
                    if (new := self._next(flow, state, eq, way, sources)) is not None
                ]
            gone = [v for v in (*eq.values, *eq.outputs) if last.get(v, eq) is eq and v not in kept]
            for state in states:
                for v in gone:
                    state.drop(v, is_input=v in inputs)
            if DEBUG: print(eq.name, len(states), end=" ")
            states = self._best(flow, states)
            if DEBUG: print(len(states))
        return states

    def _following(
        self, flow: DimsFlow, state: _State, eq: Equation, ways: Sequence[Way], place: int | None
    ) -> Sequence[Way]:
        """Return the ways that an equation may take from a state.

        Where one can use its largest operand as it is, the operand is not converted for it: a
        product before or after it is the place for that, at the same cost.

        Args:
          flow: the flow through the program.
          state: the state.
          eq: the equation.
          ways: its ways.
          place: the position of its largest operand; None if it may convert any.
        """
        if place is None:
            return ways
        operand = eq.inputs[place]
        assert isinstance(operand, Value)
        held = state.held[operand]
        if SUMMANDS in held or not held:
            return ways
        return [way for way in ways if self._is_free(flow, operand, held, way.needs[place][0])] or ways

    def _is_free(
        self, flow: DimsFlow, value: Value, have: frozenset[Holding], want: Holding
    ) -> bool:
        """Return whether a value can be had in another holding at no cost."""
        if want is SUMMANDS:
            return False
        return want in have or self._price(flow, value, have, want, False) == 0.0

    def _next(
        self, flow: DimsFlow, state: _State, eq: Equation, way: Way, sources: frozenset[Value]
    ) -> _State | None:
        """Return the state after an equation ran in a way; None if it cannot."""
        held, cost, bought = dict(state.held), state.cost + way.cost, state.bought
        for operand, wants in zip(eq.inputs, way.needs, strict=True):
            if isinstance(operand, Constant):
                if SUMMANDS in wants and not way.turns:
                    return None
                continue
            for want in wants:
                have = held[operand]
                if want in have:
                    continue
                if want is SUMMANDS:
                    if not way.turns or not any(h.is_full for h in have):
                        return None
                    held[operand] = have | {want}
                    continue
                if operand in sources and not _can_be_given(flow, operand, want):
                    # A leaf is given as copies, of which everything else is made.
                    price = self._price(flow, operand, have, COPIES, True)
                    cost, bought = cost + price, bought + price
                    held[operand] = have | {COPIES, want}
                    continue
                price = self._price(flow, operand, have, want, operand in sources)
                cost += price
                bought += price if operand in sources else 0.0
                held[operand] = have | {want}
        for v, gives in zip(eq.outputs, way.gives, strict=True):
            held[v] = frozenset((gives,))
        return _State(held, cost, bought, (eq, way, state.trace), state.read)

    def _price(
        self, flow: DimsFlow, value: Value, have: frozenset[Holding], want: Holding, source: bool
    ) -> float:
        """Return what it costs to have a value in another holding too."""
        size = bytes_of(value)
        if flow.made_of_leaves(value) and COPIES in have:
            return 0.0
        if source and flow.made_of_leaves(value):
            return self.role.leaf_price(self.costs, size, want, self.parts)
        if source:
            have = have | {WHOLE}
        has_gradient = flow.has_gradient(value)
        share, first = cheapest(have, want, self.parts, has_gradient=has_gradient)
        moves = num_moves(first, want, has_gradient=has_gradient)
        return self.costs.link * share * size + self.costs.latency * moves

    def _best(self, flow: DimsFlow, states: Iterable[_State]) -> list[_State]:
        """Return the cheapest of the states that hold the same, without those that a cheaper one can
        become at no higher cost; at most `WIDTH`."""
        found: dict[tuple[frozenset[Holding], ...], _State] = {}
        for state in states:
            key = tuple(state.held.values())
            if key not in found or state.cost < found[key].cost:
                found[key] = state
        kept: list[_State] = []
        for state in sorted(found.values(), key=lambda state: state.cost):
            if not any(self._reaches(flow, other, state) for other in kept[:LEADERS]):
                kept.append(state)
        return kept[:WIDTH]

    def _reaches(self, flow: DimsFlow, first: _State, other: _State) -> bool:
        """Return whether a state can hold all that another does and still cost no more."""
        room = other.cost - first.cost
        for (value, have), wants in zip(first.held.items(), other.held.values(), strict=True):
            for want in wants - have:
                if want is SUMMANDS or not have:
                    return False
                room -= self._price(flow, value, have, want, False)
                if room < 0:
                    return False
        return True

    def _end(
        self,
        flow: DimsFlow,
        states: Iterable[_State],
        outputs: Sequence[Sequence[Holding]],
        sources: frozenset[Value],
    ) -> tuple[_State, list[Holding]] | None:
        """Return the cheapest state whose results are converted, and their holdings; None if they
        cannot be.

        Args:
          flow: the flow through the program.
          states: the states after the last equation.
          outputs: the holdings that each result may have; any that it has, if there are none.
          sources: as in `_run`.
        """
        found = []
        for state in states:
            end, wanted = dataclasses.replace(state, held=dict(state.held)), []
            for operand, allowed in zip(flow.program.outputs, outputs, strict=True):
                if isinstance(operand, Constant):
                    wanted.append(allowed[0] if allowed else WHOLE)
                    continue
                have = end.held[operand]
                options = allowed or sorted(have - {COPIES} or {WHOLE}, key=_preference)[:1]
                (want,) = options
                if want not in have and want is SUMMANDS:
                    if not any(h.is_full for h in have):
                        break
                elif want not in have:
                    end.cost += self._price(flow, operand, have, want, operand in sources)
                wanted.append(want)
                end.held[operand] = have | {want}
            else:
                found.append((end, wanted))
        return min(found, key=lambda pair: pair[0].cost, default=None)

    def _ways(self, flow: DimsFlow, eq: Equation) -> list[Way]:
        """Return the ways of an equation that its role allows, with their costs."""
        if (ways := _OF_BODIES.get(eq.name)) is not None:
            return self.role.allowed(eq, ways(self, flow, eq), flow)
        work = self.costs.work(eq)
        made = [x for x in eq.inputs if isinstance(x, Value) and flow.is_computed(x)]
        if not any(not flow.made_of_leaves(x) or is_matrix(x.aval.shape) for x in made):
            # Constants and vectors of leaves: their parts cost nothing.
            return ways_of(eq, flow, self.parts)[:1]
        return [
            dataclasses.replace(way, cost=work / (self.parts if way.is_split else 1))
            for way in self.role.allowed(eq, ways_of(eq, flow, self.parts), flow)
        ]

def _largest(eq: Equation) -> int | None:
    """Return the position of the equation's largest operand; None if all are constants."""
    sizes = [(x.aval.size, i) for i, x in enumerate(eq.inputs) if isinstance(x, Value)]
    return max(sizes)[1] if sizes else None


def _passed(state: _State, eq: Equation) -> _State:
    """Return the state after a barrier, which passes on every holding."""
    held = dict(state.held)
    for x, v in zip(eq.inputs, eq.outputs, strict=True):
        held[v] = frozenset((WHOLE,)) if isinstance(x, Constant) else held[x]
    return dataclasses.replace(state, held=held, trace=(eq, _BARRIER, state.trace))


_BARRIER = Way((), ())

_OF_BODIES = {
    "scan": loop_ways,
    **dict.fromkeys(REMATS, remat_ways),
    **dict.fromkeys(CUSTOM_RULES, rule_ways),
}
"""The ways of equations whose bodies are searched."""


def _given(body: DimsFlow, held: Held, value: Value) -> tuple[Holding, ...]:
    """Return the holdings in which a body is given an input."""
    if body.made_of_leaves(value):
        return _of_leaf(held[value])
    return tuple(sorted(held[value], key=_preference))


def _can_be_given(flow: DimsFlow, value: Value, want: Holding) -> bool:
    """Return whether an input may be given in a holding: a leaf as copies, or as a part if it has
    another dim, along which its parts are stored in shards."""
    if not flow.made_of_leaves(value) or want is COPIES:
        return True
    return want.dim is not None and any(
        d != want.dim and n > 1 and not any(a.is_loop for a in atoms_in(dim))
        for d, (n, dim) in enumerate(zip(value.aval.shape, flow.dims[value], strict=True))
    )


def _of_leaf(holdings: frozenset[Holding]) -> tuple[Holding, ...]:
    """Return the one holding of a leaf of which some are needed: copies, if there are several."""
    return tuple(holdings) if len(holdings) == 1 else (COPIES,)


def _plan(
    flow: DimsFlow,
    state: _State,
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


def _preference(holding: Holding) -> tuple[int, int]:
    order = (Kind.PART, Kind.WHOLE, Kind.SUMMANDS, Kind.COPIES)
    return order.index(holding.kind), -1 if holding.dim is None else holding.dim
