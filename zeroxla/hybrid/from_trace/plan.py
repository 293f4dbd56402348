"""Plans how a program over whole rows is computed one place at a time.

The plan goes through the program backwards, from the slice of the result at one place. An equation
that is cut along places reads some operands at the same place, such as the queries of attention,
and others whole, such as its keys and values. An array that is wanted whole, and that is computed
place by place itself, is kept: each call computes its slice and writes it into the array of the
earlier ones. What a later place holds is not known yet, and a causal program does not read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax

from zeroxla.hybrid.from_trace.equations import AtPlace
from zeroxla.hybrid.from_trace.places import Along, ForbiddenError, Form
from zeroxla.program.primitives import ARRANGEMENTS, NEVER_FUSED
from zeroxla.program.trace import Equation, Program, Value

Places = Mapping[Value, frozenset[Along]]
"""The dims that hold places, of each value that depends on tokens."""


class Cutter(Protocol):
    """Cuts equations of all kinds along places."""

    def keep(self, value: Value) -> jax.ShapeDtypeStruct:
        """Return the array that keeps a value from place to place."""
        ...

    def behind(
        self, eq: Equation, found: Sequence[frozenset[Along] | None]
    ) -> Sequence[frozenset[Along] | None]:
        """Return the dims that hold places in each result of an equation, from those of its
        operands; None for what depends on no token."""
        ...

    def cut(self, eq: Equation, places: Places, wanted: Mapping[int, Along]) -> AtPlace:
        """Return an equation as it is computed at one place.

        Args:
          eq: the equation.
          places: the dims that hold places, of each value that depends on tokens.
          wanted: the slices that are wanted, by the number of the result.

        Raises:
          ForbiddenError: it cannot be computed at one place.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """How an equation's results are made.

    Attributes:
      equation: the equation.
      at_place: computes its slices; None if it is computed whole.
      wanted: the slices that `at_place` computes, by the number of the result.
      kept: for results that are kept, the number of the array that keeps them.
      first_state: the number of the first of the arrays that `at_place` keeps.
    """

    equation: Equation
    at_place: AtPlace | None
    wanted: Mapping[int, Along]
    kept: Mapping[int, int]
    first_state: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacePlan:
    """A program that computes one place at a time.

    Attributes:
      program: the program over whole rows.
      made: how the results of equations are made, in order. The others are not computed.
      inputs: the forms in which each input is read.
      kept_inputs: for inputs of which only slices are given, and that are read whole: the number of
        the array that keeps the input, and the dim of its places.
      states: the shapes of the arrays that are kept from place to place; they begin as zeros.
    """

    program: Program
    made: Sequence[Made]
    inputs: Sequence[Sequence[Form]]
    kept_inputs: Mapping[int, tuple[int, Along]]
    states: Sequence[jax.ShapeDtypeStruct]


def follow_places(
    program: Program, inputs: Sequence[frozenset[Along] | None], cutter: Cutter
) -> dict[Value, frozenset[Along]]:
    """Return the dims that hold places, of each value that depends on tokens.

    Args:
      program: the program.
      inputs: the same of each of its inputs; None for one that depends on no token.
      cutter: knows the equations.
    """
    found = {v: x for v, x in zip(program.inputs, inputs, strict=True) if x is not None}
    for eq in program.equations:
        if found.keys().isdisjoint(eq.values):
            continue
        mine = [found.get(x) if isinstance(x, Value) else None for x in eq.inputs]
        outs = cutter.behind(eq, mine)
        found.update((v, x) for v, x in zip(eq.outputs, outs, strict=True) if x is not None)
    return found


def plan_places(
    program: Program,
    places: Places,
    given: Mapping[int, Along],
    wanted: Mapping[int, Iterable[Form]],
    cutter: Cutter,
) -> PlacePlan:
    """Plan a program.

    Args:
      program: the program over whole rows, traced with `opened=compat.forward_jaxpr`.
      places: what `follow_places` found.
      given: the inputs of which only slices are given, by number; the others can be had in any
        form.
      wanted: the forms that are wanted of its outputs, by number.
      cutter: cuts the equations.

    Raises:
      ForbiddenError: an equation cannot be computed at one place.
    """
    planner = _PlacePlanner(places, cutter)
    for i, forms in wanted.items():
        if isinstance(operand := program.outputs[i], Value):
            planner.need(operand, forms)
    for eq in reversed(program.equations):
        planner.plan(eq)
    kept = {}
    inputs: list[list[Form]] = []
    for i, value in enumerate(program.inputs):
        forms = planner.needs.get(value, {})
        if i in given and set(forms) - {given[i]}:
            kept[i] = planner.keep(value), given[i]
            forms = {given[i]: None}
        inputs.append(list(forms))
    return PlacePlan(
        program=program,
        made=planner.made[::-1],
        inputs=inputs,
        kept_inputs=kept,
        states=planner.states,
    )


class _PlacePlanner:
    """Goes through a program backwards.

    Args:
      places, cutter: as for `plan_places`.

    Attributes:
      needs: the forms that are wanted of each value.
      made: how results are made, the last equation first.
      states: the shapes of the arrays that are kept.
    """

    def __init__(self, places: Places, cutter: Cutter) -> None:
        self.places, self.cutter = places, cutter
        self.needs: dict[Value, dict[Form, None]] = {}
        self.made: list[Made] = []
        self.states: list[jax.ShapeDtypeStruct] = []

    def need(self, value: Value, forms: Iterable[Form]) -> None:
        """Record forms that are wanted of a value."""
        self.needs.setdefault(value, {}).update(dict.fromkeys(forms))

    def keep(self, value: Value) -> int:
        """Keep a value from place to place; return the number of the array that holds it."""
        self.states.append(self.cutter.keep(value))
        return len(self.states) - 1

    def plan(self, eq: Equation) -> None:
        """Decide how an equation's results are made, if any are wanted."""
        forms = {i: self.needs[v] for i, v in enumerate(eq.outputs) if v in self.needs}
        if not forms:
            return
        wanted = {i: a for i, mine in forms.items() if (a := _first_slice(mine)) is not None}
        whole = [i for i, mine in forms.items() if None in mine]
        depends = any(v in self.places for v in eq.values)
        keeps = depends and not self._is_moved(eq)
        for i in whole if keeps else ():
            mine = self.places.get(eq.outputs[i], frozenset())
            if len(mine) == 1:
                wanted.setdefault(i, *mine)
        # Another slice than the wanted one is cut from the whole array.
        whole = [i for i, mine in forms.items() if any(x != wanted.get(i, ...) for x in mine)]
        at_place, why = None, None
        if wanted and (not whole or (keeps and set(whole) <= wanted.keys())):
            try:
                at_place = self.cutter.cut(eq, self.places, wanted)
            except ForbiddenError as error:
                why = error
        if at_place is None and depends and eq.name in NEVER_FUSED:
            raise why or ForbiddenError(eq, "it is wanted for all places at once")
        kept = {} if at_place is None else {i: self.keep(eq.outputs[i]) for i in whole}
        first = len(self.states)
        self.states += [] if at_place is None else at_place.states
        self.made.append(
            Made(equation=eq, at_place=at_place, wanted=wanted, kept=kept, first_state=first)
        )
        needs = [[None]] * len(eq.inputs) if at_place is None else at_place.needs
        for operand, mine in zip(eq.inputs, needs, strict=True):
            if isinstance(operand, Value):
                self.need(operand, mine)

    def _is_moved(self, eq: Equation) -> bool:
        """Return whether not the result of an equation is kept, but what it is made of."""
        if eq.name == "convert_element_type":
            (value,) = eq.inputs
            narrow = value.aval.dtype if isinstance(value, Value) else eq.outputs[0].aval.dtype
            return narrow.itemsize < eq.outputs[0].aval.dtype.itemsize
        return eq.name in ARRANGEMENTS


def _first_slice(forms: Iterable[Form]) -> Along | None:
    """Return the first slice among the forms that are wanted of a value."""
    return next((form for form in forms if form is not None), None)
