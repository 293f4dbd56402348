"""What values of a program follow from: the model alone, the batch alone, or both.

A value that depends both on the model (its leaves, its state) and on the rest of the inputs (the
batch, the key) is an activation. All other values are cheap to know anywhere: whoever has the
inputs can compute them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from zeroxla.program.trace import Equation, Program, Value


def activation_equations(program: Program, model: Iterable[Value]) -> list[Equation]:
    """Return the equations that make activations, in order.

    An equation that must run exactly where it stands counts as one, whatever it reads.

    Args:
      program: any program.
      model: the inputs that are the model's; the others are the batch's.
    """
    of_model = set(model)
    of_data = set(program.inputs) - of_model
    found = []
    for eq in program.equations:
        for known in (of_model, of_data):
            if eq.is_pinned or not known.isdisjoint(eq.values):
                known.update(eq.outputs)
        if eq.is_pinned or not (of_model.isdisjoint(eq.values) or of_data.isdisjoint(eq.values)):
            found.append(eq)
    return found
