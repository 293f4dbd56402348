"""What a search has found in a program and in the bodies inside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

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
      order: the equations that still run, in their order.
      read: the values that the program needs and does not make: its inputs, and values of the
        programs around it.
    """

    program: Program
    replaced: Mapping[Equation, Replacement]
    bodies: Mapping[Equation, Rewritten]
    order: tuple[Equation, ...]
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
        """Find out what still runs, and in which order."""
        instead = {v for made in replaced.values() for v in made.outputs}
        order = _ordered(program, replaced, bodies, instead)
        wanted = {x for x in program.outputs if isinstance(x, Value)}
        needed: list[Equation] = []
        for eq in reversed(order):
            if not eq.is_pinned and wanted.isdisjoint(_outputs_of(eq, replaced, instead)):
                continue
            needed.append(eq)
            wanted.update(x for x in inputs_of(eq, replaced, bodies) if isinstance(x, Value))
        made_here = {v for eq in program.equations for v in eq.outputs}
        return Rewritten(
            program=program,
            replaced=replaced,
            bodies=bodies,
            order=tuple(reversed(needed)),
            read=frozenset(wanted - made_here),
        )


def _ordered(
    program: Program,
    replaced: Mapping[Equation, Replacement],
    bodies: Mapping[Equation, Rewritten],
    instead: Collection[Value],
) -> list[Equation]:
    """Return the equations in an order in which all that they read is there: what reads the result
    of a replacement may have stood before it."""
    made_here = {v for eq in program.equations for v in eq.outputs}
    made: set[Value] = set()
    order: list[Equation] = []
    waiting: list[Equation] = []

    def add(eq: Equation) -> bool:
        own = {x for x in inputs_of(eq, replaced, bodies) if isinstance(x, Value)}
        if not made >= own & made_here:
            return False
        order.append(eq)
        made.update(_outputs_of(eq, replaced, instead))
        return True

    for eq in program.equations:
        if not add(eq):
            waiting.append(eq)
        elif eq in replaced:
            waiting = [x for x in waiting if not add(x)]
    return order


def _outputs_of(
    eq: Equation, replaced: Mapping[Equation, Replacement], instead: Collection[Value]
) -> set[Value]:
    """Return the values that an equation makes, or what runs in its place."""
    return set(replaced[eq].outputs) if eq in replaced else set(eq.outputs) - set(instead)


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
