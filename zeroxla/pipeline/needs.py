"""What an equation or a program reads for some of its results.

A result of a loop needs the carries that it depends on, and not the others. A result of a barrier
needs one operand. Any other equation needs all of its operands for each of its results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable

from zeroxla.program import compat
from zeroxla.program.primitives import COLLECTIVES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value, flatten
from zeroxla.program.walk import walk

BARRIER = "optimization_barrier"


@functools.lru_cache(maxsize=256)
def body_of(scan: Scan) -> Program:
    """Return the program of a turn of a loop, the same one each time."""
    return flatten(scan.jaxpr, compat.backward_jaxpr)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopNeeds:
    """What a loop needs for some of its results.

    Attributes:
      carries: the carries that must be computed, by number.
      ys: the stacked results among those that are wanted, by number.
      inputs: the inputs of the body that a turn reads.
    """

    carries: tuple[int, ...]
    ys: tuple[int, ...]
    inputs: frozenset[Value]

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(scan: Scan, outs: frozenset[int]) -> LoopNeeds:
        """Return what a loop needs.

        Args:
          scan: the loop.
          outs: the numbers of the results that are wanted.
        """
        body, num = body_of(scan), scan.num_carry
        carried = scan.split_inputs(body.inputs)[1]
        ys = tuple(sorted(i - num for i in outs if i >= num))
        carries = {i for i in outs if i < num}
        while True:
            needed = needed_inputs(body, [*carries, *(num + i for i in ys)])
            more = {i for i, v in enumerate(carried) if v in needed} - carries
            if not more:
                return LoopNeeds(tuple(sorted(carries)), ys, frozenset(needed))
            carries |= more

    def operands(self, scan: Scan) -> list[Value]:
        """Return the values that the loop reads."""
        consts, _, xs = scan.split_inputs(body_of(scan).inputs)
        found = [a for a, v in zip(scan.consts, consts, strict=True) if v in self.inputs]
        found += [scan.carry[i] for i in self.carries]
        found += [a for a, v in zip(scan.xs, xs, strict=True) if v in self.inputs]
        return [a for a in found if isinstance(a, Value)]


def made_for(eq: Equation, wanted: Collection[Value]) -> tuple[int, ...]:
    """Return the numbers of the results that an equation makes where some are wanted."""
    outs = tuple(i for i, v in enumerate(eq.outputs) if v in wanted)
    if eq.has_effects or (outs and eq.name not in (BARRIER, "scan")):
        return tuple(range(len(eq.outputs)))
    if outs and eq.name == "scan":
        carries = LoopNeeds.of(Scan(eq), frozenset(outs)).carries
        return tuple(sorted({*outs, *carries}))
    return outs


def operands_of(eq: Equation, outs: Collection[int]) -> list[Value]:
    """Return the values that an equation reads for some of its results."""
    if eq.has_effects:
        return list(eq.values)
    if eq.name == BARRIER:
        return [v for i in outs if isinstance(v := eq.inputs[i], Value)]
    if eq.name == "scan":
        return LoopNeeds.of(Scan(eq), frozenset(outs)).operands(Scan(eq))
    return list(eq.values)


def needed_inputs(program: Program, outs: Iterable[int]) -> set[Value]:
    """Return the inputs of a program that some of its results need."""
    needed = {v for i in outs if isinstance(v := program.outputs[i], Value)}
    for eq in reversed(program.equations):
        if (made := made_for(eq, needed)) or eq.has_effects:
            needed.update(operands_of(eq, made))
    return needed & set(program.inputs)


def talks(eq: Equation, platform: str) -> bool:
    """Whether an equation, or one inside it, is a collective."""
    visits = walk(Program((), (eq,), ()), platform)
    return any(visit.equation.name in COLLECTIVES for visit in visits)
