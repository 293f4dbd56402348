"""`LeafFlow`: which leaves a value is gathered from, and of which leaves it is a gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from zeroxla.program.phases import phase_of
from zeroxla.program.primitives import CUTS_OR_JOINS, FUSED, HLO_KINDS, RENAMES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value
from zeroxla.program.walk import body_of, scope_path

Leaves = frozenset[int]
"""Numbers of leaves."""

_NONE: Leaves = frozenset()
_PASSES = RENAMES | CUTS_OR_JOINS


@dataclasses.dataclass(frozen=True, slots=True)
class LeafFlow:
    """The leaves that the values of one program come from, and those whose gradients they become.

    A value follows a leaf through what gathers and reduces it, and through what only renames,
    casts, cuts or joins arrays. Leaves that share a buffer are not told apart in it.

    Attributes:
      sources: the leaves that a value is gathered from.
      targets: the leaves of which it is a gradient, or a part of one.
    """

    sources: dict[Operand, Leaves]
    targets: dict[Operand, Leaves]

    @staticmethod
    def of(
        program: Program,
        path: str,
        inputs: Iterable[Leaves],
        outputs: Iterable[Leaves],
    ) -> LeafFlow:
        """Follow the leaves through a program.

        Args:
          program: the program.
          path: the path of the scopes around it.
          inputs: the leaves that each input comes from; those left out come from none.
          outputs: the leaves of which each output is a gradient; likewise.
        """
        sources: dict[Operand, Leaves] = {
            v: x for v, x in zip(program.inputs, inputs, strict=False) if x
        }
        targets: dict[Operand, Leaves] = {
            v: x
            for v, x in zip(program.outputs, outputs, strict=False)
            if x and isinstance(v, Value)
        }
        phases = [_phase(eq, path) for eq in program.equations]
        for eq, phase in zip(program.equations, phases, strict=True):
            if phase.endswith("gather") or eq.name in _PASSES:
                _pass_on(sources, eq.inputs, eq.outputs, eq)
            elif eq.name == "scan" and any(v in sources for v in eq.inputs):
                body, here = body_of(Scan(eq).jaxpr), scope_path(eq, path)
                given = [sources.get(v, _NONE) for v in eq.inputs]
                inner = LeafFlow.of(body, here, given, ()).sources
                found = zip(eq.outputs, body.outputs, strict=True)
                sources.update((v, inner[x]) for v, x in found if x in inner)
        for eq, phase in zip(reversed(program.equations), reversed(phases), strict=True):
            once = eq.name in FUSED and phase not in ("forward", "backward")
            if phase == "reduce" or eq.name in _PASSES or once:
                _pass_on(targets, eq.outputs, eq.inputs, eq)
        return LeafFlow(sources, targets)

    def inside(self, eq: Equation, body: Program, path: str) -> LeafFlow:
        """Return the flow through the body of a loop, a branch or a call; `path` is the
        equation's."""
        operands = eq.inputs
        if eq.name in ("cond", "while"):
            operands = operands[len(operands) - len(body.inputs) :]
        inputs = [self.sources.get(v, _NONE) for v in operands]
        outputs = [self.targets.get(v, _NONE) for v in eq.outputs]
        if eq.name == "scan":  # A carry's first value may come from no leaf.
            first, num = Scan(eq).num_consts, Scan(eq).num_carry
            carried = [self.sources.get(v, _NONE) for v in eq.outputs[:num]]
            inputs[first : first + num] = [
                a | b for a, b in zip(inputs[first : first + num], carried, strict=True)
            ]
        return LeafFlow.of(body, path, inputs, outputs)


def _pass_on(
    found: dict[Operand, Leaves], given: Iterable[Operand], to: Iterable[Operand], eq: Equation
) -> None:
    """Give the leaves of some values to others: one to one through a barrier, else all to all."""
    if eq.name == "optimization_barrier":
        pairs = [([a], [b]) for a, b in zip(given, to, strict=True)]
    else:
        pairs = [(list(given), list(to))]
    for some, others in pairs:
        leaves = _NONE.union(*(found.get(v, _NONE) for v in some))
        if leaves:
            to_arrays = (v for v in others if isinstance(v, Value) and not _is_scalar(v))
            found.update((v, found.get(v, _NONE) | leaves) for v in to_arrays)


def _is_scalar(value: Value) -> bool:
    """Whether a value is a number for all leaves, such as a norm; a ticket for a leaf on disk has a
    dim."""
    return not value.aval.shape


def _phase(eq: Equation, path: str) -> str:
    return phase_of(scope_path(eq, path), HLO_KINDS.get(eq.name, ""))
