"""The kinds of temporary values of a training step, by the scopes that they are made in."""

from __future__ import annotations

from zeroxla.program.phases import phase_of
from zeroxla.program.primitives import HLO_KINDS
from zeroxla.program.trace import Equation

GATHERED, GRADIENTS, ACTIVATIONS = "gathered leaves", "gradients", "activations"
"""The kinds of temporary values while gradients are computed."""
RESIDUALS, OTHERS = "residuals", "other temporaries"
"""What activations consist of: what forward leaves for backward, and everything else."""
SUB_GROUPS = "sub-groups of the update"
"""What is on the device of an offloaded state while it is updated."""


def kind_of(eq: Equation, path: str) -> str:
    """Return the kind of an equation's results, from the scopes that it is in."""
    phase = phase_of(path, HLO_KINDS.get(eq.name, ""))
    if phase.endswith("gather"):
        return GATHERED
    if phase == "reduce" or (phase == "backward" and eq.name == "scan"):
        return GRADIENTS
    return ACTIVATIONS
