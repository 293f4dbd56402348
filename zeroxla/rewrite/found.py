"""What a search has found in a program and in the bodies inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from zeroxla.program.trace import Equation, Operand, Program, Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replacement:
    """What runs in the place of equations.

    Attributes:
      inputs: the operands that it reads, which may be of a program around.
      outputs: the values that it makes.
      run: computes them.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    run: Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rewritten:
    """A program, and what runs otherwise in it.

    Attributes:
      program: the program.
      replaced: by the equation in whose place they run, the replacements.
      bodies: the loops and `jax.checkpoint` bodies that have some inside.
      needed: the equations that still run.
      read: the values that the program needs and does not make: its inputs, and values of the
        programs around it.
    """

    program: Program
    replaced: Mapping[Equation, Replacement]
    bodies: Mapping[Equation, Rewritten]
    needed: frozenset[Equation]
    read: frozenset[Value]

    @property
    def is_changed(self) -> bool:
        """Whether anything runs otherwise."""
        return bool(self.replaced or self.bodies)

    @staticmethod
    def of(
        program: Program,
        replaced: Mapping[Equation, Replacement],
        bodies: Mapping[Equation, Rewritten],
    ) -> Rewritten:
        """Find out what still runs."""
        wanted = {x for x in program.outputs if isinstance(x, Value)}
        needed: set[Equation] = set()
        for eq in reversed(program.equations):
            made = replaced[eq].outputs if eq in replaced else eq.outputs
            if not eq.is_pinned and wanted.isdisjoint(made):
                continue
            needed.add(eq)
            wanted.update(x for x in inputs_of(eq, replaced, bodies) if isinstance(x, Value))
        made_here = {v for eq in program.equations for v in eq.outputs}
        return Rewritten(
            program=program,
            replaced=replaced,
            bodies=bodies,
            needed=frozenset(needed),
            read=frozenset(wanted - made_here),
        )


def inputs_of(
    eq: Equation, replaced: Mapping[Equation, Replacement], bodies: Mapping[Equation, Rewritten]
) -> Sequence[Operand]:
    """Return the operands that an equation reads, or what runs in its place."""
    if eq in replaced:
        return replaced[eq].inputs
    if eq not in bodies:
        return eq.inputs
    body = bodies[eq]
    own = zip(body.program.inputs, eq.inputs, strict=True)
    around = body.read - set(body.program.inputs)
    return [*(x for v, x in own if v in body.read), *around]
