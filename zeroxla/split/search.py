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
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zeroxla.mesh.axes import EXPERT
from zeroxla.program.primitives import CUSTOM_RULES, REMATS, WINDOWS
from zeroxla.program.trace import Constant, Equation, Value
from zeroxla.split.atoms import Atom
from zeroxla.split.axis_roles import is_matrix
from zeroxla.split.dims_flow import DimsFlow
from zeroxla.split.halo import halo_ways
from zeroxla.split.holdings import COPIES, SUMMANDS, WHOLE, Holding, Kind
from zeroxla.split.inner_ways import loop_ways, remat_ways, rule_ways
from zeroxla.split.plan_proof import PlanProof
from zeroxla.split.plan_states import (
    Held,
    PlanState,
    bring,
    given_as,
    of_leaf,
    passed,
    plan_of,
    preference,
)
from zeroxla.split.prices import Prices, can_be_given
from zeroxla.split.ragged import RaggedRows
from zeroxla.split.shift import shift_ways
from zeroxla.split.ways import AxisPlan, Way, ways_of

WIDTH = 128
"""The most states that are followed."""

LEADERS = 16
"""The cheapest states, with which others are compared."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AxisSearch(Prices):
    """Searches for plans on one axis. What it has found of an equation or a value is remembered: a
    loop's body is searched several times.

    Attributes:
      proof: knows which ways are wrong.
      fixed: the holdings of leaves that are pinned, those of bodies' inputs included.
      pinned: the holdings that other pinned arrays may have.
    """

    proof: PlanProof = dataclasses.field(default_factory=PlanProof)
    fixed: Mapping[Value, Holding] = dataclasses.field(default_factory=dict)
    pinned: Mapping[Value, tuple[Holding, ...]] = dataclasses.field(default_factory=dict)
    _ways_of: dict[Equation, list[Way]] = dataclasses.field(default_factory=dict, init=False)
    _ragged: dict[DimsFlow, RaggedRows] = dataclasses.field(default_factory=dict, init=False)

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
        given = {v: self.fixed[v] for v in leaves if v in self.fixed}
        if known is not None:
            given = dict(zip(leaves, known, strict=True))
        held.update((v, frozenset((h,))) for v, h in given.items())
        held.update(dict.fromkeys(inputs[num_leaves:], frozenset((WHOLE,))))
        outputs = [(WHOLE,)] * len(flow.program.outputs)
        sources = frozenset(leaves) - given.keys()
        states = self._run(flow, held, sources)
        end = self._end(flow, states, outputs, sources)
        assert end is not None, "everything can run whole"
        state, wanted = end
        held |= state.inputs()
        ins = [(given[v],) if v in given else of_leaf(held[v]) for v in leaves]
        ins += [(WHOLE,)] * (len(inputs) - num_leaves)
        return plan_of(flow, state, wanted, ins)

    def along(self, atom: Atom) -> AxisSearch:
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
        given = {**{v: self.fixed[v] for v in chosen if v in self.fixed}, **given}
        sources = frozenset(chosen) - given.keys()
        held: Held = {v: frozenset((h,)) for v, h in given.items()}
        held.update(dict.fromkeys(sources, frozenset()))
        states = self._run(body, held, sources)
        if not states:
            return None
        end = self._end(body, states, outputs, sources)
        if end is None:
            return None
        state, wanted = end
        held |= state.inputs()
        inputs = [
            (given[v],) if v in given else given_as(body, held, v) for v in body.program.inputs
        ]
        return plan_of(body, state, wanted, inputs)

    def _run(self, flow: DimsFlow, given: Held, sources: frozenset[Value]) -> list[PlanState]:
        """Return the states after the equations of a program. A state has an input from its first
        reader on.

        Args:
          flow: the flow through the program.
          given: the holdings of its inputs.
          sources: the inputs whose holdings are chosen when they are first read.
        """
        program, states, waiting = flow.program, [PlanState({})], dict(given)
        kept = {x for x in program.outputs if isinstance(x, Value)}
        inputs = frozenset(program.inputs)
        last = {v: eq for eq in program.equations for v in eq.values}
        for eq in program.equations:
            bring(states, waiting, eq.inputs)
            if eq.name == "optimization_barrier":
                states = [passed(state, eq) for state in states]
            else:
                ways = self._ways(flow, eq)
                states = [
                    new
                    for state in states
                    for way in ways
                    if (new := self._next(flow, state, eq, way, sources)) is not None
                ]
            gone = [v for v in (*eq.values, *eq.outputs) if last.get(v, eq) is eq and v not in kept]
            for state in states:
                for v in gone:
                    state.drop(v, is_input=v in inputs)
            states = self._best(flow, states)
        bring(states, waiting, program.outputs)
        return states

    def _next(
        self, flow: DimsFlow, state: PlanState, eq: Equation, way: Way, sources: frozenset[Value]
    ) -> PlanState | None:
        """Return the state after an equation ran in a way; None if it cannot."""
        held, cost, bought = dict(state.held), state.cost + way.cost, state.bought
        for operand, wants in zip(eq.inputs, way.needs, strict=True):
            if isinstance(operand, Constant):
                if SUMMANDS in wants and not way.adds_up:
                    return None
                continue
            for want in wants:
                have = held[operand]
                if want in have:
                    continue
                if want is SUMMANDS:
                    from_full = way.adds_up and any(h.is_full for h in have)
                    if not from_full and not any(h.kind is Kind.RAGGED for h in have):
                        return None
                    held[operand] = have | {want}
                    continue
                if operand in sources and not can_be_given(flow, operand, want):
                    # A leaf is given as copies, of which everything else is made.
                    price = self.price(flow, operand, have, COPIES, True)
                    cost, bought = cost + price, bought + price
                    held[operand] = have | {COPIES, want}
                    continue
                price = self.price(flow, operand, have, want, operand in sources)
                cost += price
                bought += price if operand in sources else 0.0
                held[operand] = have | {want}
        for v, kept in zip(eq.outputs, way.kept, strict=True):
            held[v] = frozenset((kept,))
        return PlanState(held, cost, bought, (eq, way, state.trace), state.read)

    def _best(self, flow: DimsFlow, states: Iterable[PlanState]) -> list[PlanState]:
        """Return the cheapest of the states that hold the same; at most `WIDTH`. States that a
        cheaper one can become at no higher cost are left out."""
        found: dict[tuple[frozenset[Holding], ...], PlanState] = {}
        for state in states:
            key = tuple(state.held.values())
            if key not in found or state.cost < found[key].cost:
                found[key] = state
        kept: list[PlanState] = []
        for state in sorted(found.values(), key=lambda state: state.cost):
            if not any(self.reaches(flow, other, state) for other in kept[:LEADERS]):
                kept.append(state)
        return kept[:WIDTH]

    def _end(
        self,
        flow: DimsFlow,
        states: Iterable[PlanState],
        outputs: Sequence[Sequence[Holding]],
        sources: frozenset[Value],
    ) -> tuple[PlanState, list[Holding]] | None:
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
                kept = [h for h in have if h is not COPIES and h.kind is not Kind.RAGGED]
                (want,) = allowed or sorted(kept or [WHOLE], key=preference)[:1]
                if want not in have and want is SUMMANDS:
                    if not any(h.is_full or h.kind is Kind.RAGGED for h in have):
                        break
                elif want not in have:
                    end.cost += self.price(flow, operand, have, want, operand in sources)
                wanted.append(want)
                end.held[operand] = have | {want}
            else:
                found.append((end, wanted))
        return min(found, key=lambda pair: pair[0].cost, default=None)

    def _ways(self, flow: DimsFlow, eq: Equation) -> list[Way]:
        """Return the ways of an equation that its role allows, with their costs."""
        if eq not in self._ways_of:
            ways = self._found_ways(flow, eq)
            if not self.pinned.keys().isdisjoint(eq.outputs):
                ways = [kept for way in ways for kept in self._kept(flow, eq, way)]
            self._ways_of[eq] = ways
        return self._ways_of[eq]

    def _found_ways(self, flow: DimsFlow, eq: Equation) -> list[Way]:
        if (of_body := _OF_BODIES.get(eq.name)) is not None:
            ways = [*of_body(self, flow, eq), *self._ragged_ways(flow, eq)]
            return self._allowed(flow, eq, ways)
        work = self.costs.work(eq)
        made = [x for x in eq.inputs if isinstance(x, Value) and flow.is_computed(x)]
        if not any(not flow.made_of_leaves(x) or is_matrix(x.aval.shape) for x in made):
            # Constants and vectors of leaves: their parts cost nothing.
            return ways_of(eq, flow, self.parts)[:1]
        ways = [
            dataclasses.replace(way, cost=work / (self.parts if way.is_split else 1))
            for way in ways_of(eq, flow, self.parts)
        ]
        if (exchanged := _EXCHANGED.get(eq.name)) is not None:
            ways += exchanged(eq, flow, self.parts, self.costs)
        return self._allowed(flow, eq, [*ways, *self._ragged_ways(flow, eq)])

    def _ragged_ways(self, flow: DimsFlow, eq: Equation) -> list[Way]:
        """Return the ways of an equation on rows that are sorted by expert."""
        if self.role.name != EXPERT:
            return []
        if flow not in self._ragged:
            self._ragged[flow] = RaggedRows.of(flow, self.parts)
        return self._ragged[flow].ways(eq, self.costs.work(eq))

    def _kept(self, flow: DimsFlow, eq: Equation, way: Way) -> Iterator[Way]:
        """Yield a way with its pinned results in each combination of the holdings they may have."""
        options = [self.pinned.get(v, (h,)) for v, h in zip(eq.outputs, way.gives, strict=True)]
        for keeps in itertools.product(*options):
            cost = way.cost
            for v, have, want in zip(eq.outputs, way.gives, keeps, strict=True):
                cost += self.price(flow, v, frozenset((have,)), want, False)
            yield dataclasses.replace(way, keeps=keeps, cost=cost)

    def _allowed(self, flow: DimsFlow, eq: Equation, ways: Sequence[Way]) -> list[Way]:
        """Return the ways that are not known to be wrong, and that the role allows."""
        right = [way for way in ways if self.proof.allows(eq, flow, way, self.parts)]
        return self.role.allowed(eq, right, flow)


_EXCHANGED = {**dict.fromkeys(WINDOWS, halo_ways), "pad": shift_ways}
"""The ways of equations in which devices exchange the edges of their parts."""

_OF_BODIES = {
    "scan": loop_ways,
    **dict.fromkeys(REMATS, remat_ways),
    **dict.fromkeys(CUSTOM_RULES, rule_ways),
}
"""The ways of equations whose bodies are searched."""
