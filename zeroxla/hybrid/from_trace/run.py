"""Runs a program one place at a time, as its plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from zeroxla.hybrid.from_trace.places import Along, Form, PlaceAxis
from zeroxla.hybrid.from_trace.plan import Made, PlacePlan
from zeroxla.program import compat
from zeroxla.program.trace import Constant, Operand

Forms = Mapping[Form, jax.Array]
"""An array in one or several forms."""


class Outputs:
    """The arrays of one call, each in the forms that it has been computed in.

    Args:
      plan: the plan.
      axis: the place.
      inputs: the program's inputs.
      states: the arrays that are kept from place to place.

    Attributes:
      states: the same after the call.
    """

    def __init__(
        self,
        plan: PlacePlan,
        axis: PlaceAxis,
        inputs: Sequence[Forms],
        states: Sequence[jax.Array],
    ) -> None:
        self.axis, self.states = axis, list(states)
        self._env: dict[Operand, dict[Form, jax.Array]] = {
            v: dict(x) for v, x in zip(plan.program.inputs, inputs, strict=True)
        }
        for i, (state, along) in plan.kept_inputs.items():
            self._keep(plan.program.inputs[i], along, state)
        for made in plan.made:
            self._make(made)

    def get(self, operand: Operand, form: Form) -> jax.Array:
        """Return an array in a form."""
        if isinstance(operand, Constant):
            if form is None:
                return operand.value
            return self.axis.slice_of(jnp.asarray(operand.value), form)
        found = self._env[operand]
        if form not in found:
            assert form is not None, operand
            return self.axis.slice_of(found[None], form)
        return found[form]

    def _make(self, made: Made) -> None:
        """Compute an equation's results, in the forms that the plan says."""
        eq = made.equation
        if made.at_place is None:
            args = [self.get(x, None) for x in eq.inputs]
            outs = compat.call_equation(eq.source, eq.name_stack, args)
            self._env.update((v, {None: x}) for v, x in zip(eq.outputs, outs, strict=True))
            return
        end = made.first_state + len(made.at_place.states)
        states = self.states[made.first_state : end]
        outs, self.states[made.first_state : end] = made.at_place.run(
            self.axis, lambda i, form: self.get(eq.inputs[i], form), states
        )
        for i, along in made.wanted.items():
            part = outs[i]
            assert part is not None, eq
            self._env[eq.outputs[i]] = {along: part}
            if i in made.kept:
                self._keep(eq.outputs[i], along, made.kept[i])

    def _keep(self, operand: Operand, along: Along, state: int) -> None:
        """Write an array's slice into the array that keeps it, which is then the whole array."""
        found = self._env[operand]
        whole = self.axis.write(self.states[state], found[along], along)
        self.states[state] = whole
        found[None] = whole.astype(found[along].dtype)
