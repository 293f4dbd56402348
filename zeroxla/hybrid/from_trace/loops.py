"""Computes loops at one place: loops over layers, and loops over the places themselves.

A loop over layers carries activations. It is run with a body that computes one place; what the body
keeps is kept for each layer. A loop over places reads one place in each turn, as recurrent layers
do. One of its turns is run, and its carry is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.hybrid.from_trace.equations import Get
from zeroxla.hybrid.from_trace.places import Along, ForbiddenError, Form, PlaceAxis
from zeroxla.hybrid.from_trace.plan import Cutter, PlacePlan, follow_places, plan_places
from zeroxla.hybrid.from_trace.run import Forms, Outputs
from zeroxla.program import compat
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Program, Value

Found = frozenset[Along] | None
"""The dims of an array that hold places; None if it depends on no token."""


def places_behind_loop(scan: Scan, found: Sequence[Found], cutter: Cutter) -> Sequence[Found]:
    """Return the dims that hold places in each result of a loop, from those of its operands."""
    if _goes_over_places(scan, found):
        # What one place gives depends on the carry, and so on the places before it.
        ys = [frozenset({Along(0)})] * len(scan.ys)
        return [*([frozenset()] * scan.num_carry), *ys]
    return _follow(scan, scan.body(compat.forward_jaxpr), found, cutter)[1]


def cut_loop(
    scan: Scan, found: Sequence[Found], wanted: Mapping[int, Along], cutter: Cutter
) -> OverPlaces | OverLayers:
    """Return a loop as it is computed at one place.

    Args:
      scan: the loop.
      found: the dims that hold places in each operand.
      wanted: the slices that are wanted, by the number of the result.
      cutter: cuts the equations of its body.

    Raises:
      ForbiddenError: the loop, or an equation in it, cannot be computed at one place.
    """
    if _goes_over_places(scan, found):
        return OverPlaces.of(scan, found, wanted)
    return OverLayers.of(scan, found, wanted, cutter)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverPlaces:
    """A loop over places.

    Attributes:
      scan: the loop.
      body: one turn of it.
      needs, states: see `AtPlace`.
    """

    scan: Scan
    body: Program
    needs: Sequence[Sequence[Form]]
    states: Sequence[jax.ShapeDtypeStruct]

    @staticmethod
    def of(scan: Scan, found: Sequence[Found], wanted: Mapping[int, Along]) -> OverPlaces:
        """Cut the loop; see `cut_loop`."""
        consts, carry, xs = scan.split_inputs(found)
        if scan.reverse:
            raise ForbiddenError(scan.equation, "it goes from the last place to the first")
        if any(i < scan.num_carry for i in wanted):
            raise ForbiddenError(scan.equation, "what it carries at its end is wanted")
        if any(along != Along(0) for along in wanted.values()):
            raise ForbiddenError(scan.equation, "it goes over places along another dim")
        if any(x is not None for x in (*consts, *carry)):
            raise ForbiddenError(scan.equation, "it begins with what depends on tokens")
        needs: list[list[Form]] = [[None]] * scan.first_x
        return OverPlaces(
            scan=scan,
            body=scan.body(compat.forward_jaxpr),
            needs=[*needs, *([Along(0)] for _ in xs)],
            states=[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _carry_of(scan)],
        )

    def run(
        self, axis: PlaceAxis, get: Get, states: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array | None], Sequence[jax.Array]]:
        """See `AtPlace`."""
        args = [get(i, form) for i, (form,) in enumerate(self.needs)]
        consts, first, xs = self.scan.split_inputs(args)
        carry = [jnp.where(axis.index == 0, a, b) for a, b in zip(first, states, strict=True)]
        outs = self.body(*consts, *carry, *(x[0] for x in xs))
        carry, ys = self.scan.split_outputs(outs)
        return [*(None for _ in carry), *(jnp.asarray(y)[None] for y in ys)], carry


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OverLayers:
    """A loop that carries activations.

    Attributes:
      scan: the loop.
      plan: one turn of it at one place.
      carried: the form of each array that it carries, by its number.
      forms: the form of each result that is wanted or carried on, by its number.
      needs, states: see `AtPlace`.
    """

    scan: Scan
    plan: PlacePlan
    carried: Mapping[int, Form]
    forms: Mapping[int, Form]
    needs: Sequence[Sequence[Form]]
    states: Sequence[jax.ShapeDtypeStruct]

    @staticmethod
    def of(
        scan: Scan, found: Sequence[Found], wanted: Mapping[int, Along], cutter: Cutter
    ) -> OverLayers:
        """Cut the loop; see `cut_loop`."""
        eq, body = scan.equation, scan.body(compat.forward_jaxpr)
        inside, results = _follow(scan, body, found, cutter)
        forms: dict[int, Form] = {}
        for i, along in wanted.items():
            if i >= scan.num_carry and along.dim == 0:
                raise ForbiddenError(eq, "it stacks what it computes along places")
            forms[i] = along if i < scan.num_carry else along.behind(-1)
        while True:
            given = {}
            for i in range(scan.num_carry):
                if (mine := results[i]) is not None:
                    if len(mine) != 1 and i in forms:
                        raise ForbiddenError(eq, "it carries an array with two dims of places")
                    if len(mine) == 1:
                        given[scan.num_consts + i] = next(iter(mine))
            plan = plan_places(
                body, inside, given, {i: [form] for i, form in forms.items()}, cutter
            )
            more = {
                i: given.get(scan.num_consts + i)
                for i in range(scan.num_carry)
                if i not in forms and plan.inputs[scan.num_consts + i]
            }
            if any(results[i] is not None and form is None for i, form in more.items()):
                raise ForbiddenError(eq, "it carries an array whose places are not known")
            if not more:
                break
            forms.update(more)
        carried = {i: given.get(scan.num_consts + i) for i in forms if i < scan.num_carry}
        if any(forms[i] != along for i, along in carried.items()):
            raise ForbiddenError(eq, "it carries places along another dim")
        consts, _, xs = scan.split_inputs(plan.inputs)
        carry: list[list[Form]] = [
            [carried[i]] if i in carried else [] for i in range(scan.num_carry)
        ]
        stacked = [[form and form.behind(1) for form in mine] for mine in xs]
        return OverLayers(
            scan=scan,
            plan=plan,
            carried=carried,
            forms=forms,
            needs=[*consts, *carry, *stacked],
            states=[jax.ShapeDtypeStruct((scan.length, *x.shape), x.dtype) for x in plan.states],
        )

    def run(
        self, axis: PlaceAxis, get: Get, states: Sequence[jax.Array]
    ) -> tuple[Sequence[jax.Array | None], Sequence[jax.Array]]:
        """See `AtPlace`."""
        scan = self.scan
        args = [{form: get(i, form) for form in mine} for i, mine in enumerate(self.needs)]
        consts, carry, xs = scan.split_inputs(args)
        xs = [{form and form.behind(-1): x for form, x in mine.items()} for mine in xs]
        first = {i: carry[i][form] for i, form in self.carried.items()}

        def turn(carry: dict[int, jax.Array], now: Any) -> tuple[Any, Any]:
            slices, kept = now
            mine: list[Forms] = [
                {self.carried[i]: carry[i]} if i in carry else {} for i in range(scan.num_carry)
            ]
            layer: list[Forms] = [
                dict(zip(x, part, strict=True)) for x, part in zip(xs, slices, strict=True)
            ]
            outs = Outputs(self.plan, axis, [*consts, *mine, *layer], kept)
            results = self.plan.program.outputs
            found = {i: jnp.asarray(outs.get(results[i], form)) for i, form in self.forms.items()}
            ys = {i: x for i, x in found.items() if i >= scan.num_carry}
            after = {i: found[i].astype(carry[i].dtype) for i in carry}
            return after, (ys, outs.states)

        slices = [list(x.values()) for x in xs]
        carry, (ys, states) = scan.run(turn, first, (slices, list(states)))
        outs = {**carry, **ys}
        return [outs.get(i) for i in range(len(scan.equation.outputs))], states


def _goes_over_places(scan: Scan, found: Sequence[Found]) -> bool:
    """Return whether the turns of a loop read one place each."""
    xs = scan.split_inputs(found)[2]
    return any(x is not None and Along(0) in x for x in xs)


def _follow(
    scan: Scan, body: Program, found: Sequence[Found], cutter: Cutter
) -> tuple[dict[Value, frozenset[Along]], list[Found]]:
    """Follow places through a loop over layers.

    Returns:
      The dims that hold places of each value of the body, and of each result of the loop.
    """
    consts, carry, xs = scan.split_inputs(found)
    carry = list(carry)
    slices = [None if x is None else frozenset(a.behind(-1) for a in x) for x in xs]
    while True:
        inside = follow_places(body, [*consts, *carry, *slices], cutter)
        outs = [inside.get(x) if isinstance(x, Value) else None for x in body.outputs]
        after, ys = scan.split_outputs(outs)
        joined = [_both(a, b) for a, b in zip(carry, after, strict=True)]
        if joined == carry:
            break
        carry = joined
    stacked = [None if x is None else frozenset(a.behind(1) for a in x) for x in ys]
    return inside, [*carry, *stacked]


def _both(a: Found, b: Found) -> Found:
    """Return the dims that hold places in one array or the other."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _carry_of(scan: Scan) -> Sequence[Any]:
    """Return the results that are what the loop carries at its end."""
    return scan.split_outputs(scan.equation.outputs)[0]
