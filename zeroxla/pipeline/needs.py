"""What an equation or a program reads for some of its results.

A result of a loop needs the carries that it depends on, and not the others. A result of a barrier
needs one operand. Any other equation needs all of its operands for each of its results.

Results that are light are computed with those that are wanted: what is there anyway, and sums over
the rows, such as the gradients of biases and norms, which need no product and are smaller than what
must be kept for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping

from zeroxla.program import compat
from zeroxla.program.primitives import COLLECTIVES, FUSED, REDUCTIONS, RENAMES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value, bytes_of, flatten
from zeroxla.program.walk import walk

BARRIER = "optimization_barrier"
Made = dict[Equation, tuple[int, ...]]
"""Equations in order, each with the numbers of the results that it makes."""

LIGHT = FUSED | REDUCTIONS | RENAMES
"""Equations that cost little more than reading their operands."""


@functools.lru_cache(maxsize=256)
def body_of(scan: Scan) -> Program:
    """Return the program of a turn of a loop."""
    return flatten(scan.jaxpr, compat.backward_jaxpr)


@dataclasses.dataclass(frozen=True, slots=True)
class LoopNeeds:
    """What a loop needs for some of its results.

    Attributes:
      carries: the carries that must be computed, by number.
      ys: the stacked results that are wanted, and those that are light, by number.
      inputs: the inputs of the body that a turn reads, by number.
    """

    carries: tuple[int, ...]
    ys: tuple[int, ...]
    inputs: frozenset[int]

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
        ys = {i for i in outs if i >= num}
        carries = {i for i in outs if i < num}
        while True:
            needed = needed_inputs(body, [*carries, *ys])
            more = {i for i, v in enumerate(carried) if v in needed} - carries
            if not more:
                break
            carries |= more
        others = {v for i, v in enumerate(carried) if i not in carries}
        left = [i for i in range(num, len(body.outputs)) if i not in ys]
        ys |= {*light_results(body, [*carries, *ys], left, carried=carried, without=others)}
        needed = needed_inputs(body, [*carries, *ys])
        stacked = tuple(sorted(i - num for i in ys))
        inputs = frozenset(i for i, v in enumerate(body.inputs) if v in needed)
        return LoopNeeds(tuple(sorted(carries)), stacked, inputs)

    def results(self, scan: Scan) -> list[int]:
        """Return the numbers of the loop's results that are computed."""
        return [*self.carries, *(scan.num_carry + i for i in self.ys)]

    def operands(self, scan: Scan) -> list[Value]:
        """Return the values that the loop reads."""
        first = scan.num_consts
        carried = range(first, scan.first_x)
        read = self.inputs.difference(carried).union(first + i for i in self.carries)
        operands = (scan.equation.inputs[i] for i in sorted(read))
        return [a for a in operands if isinstance(a, Value)]


def made_for(eq: Equation, wanted: Collection[Value]) -> tuple[int, ...]:
    """Return the numbers of the results that an equation makes where some are wanted."""
    outs = tuple(i for i, v in enumerate(eq.outputs) if v in wanted)
    if eq.has_effects or (outs and eq.name not in (BARRIER, "scan")):
        return tuple(range(len(eq.outputs)))
    if outs and eq.name == "scan":
        return tuple(LoopNeeds.of(Scan(eq), frozenset(outs)).results(Scan(eq)))
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


def equations_for(
    program: Program,
    outs: Iterable[int],
    *,
    also: Collection[Value] = (),
    unknown: Collection[Value] = (),
) -> Made:
    """Return the equations that some results of a program need, with what each of them makes.

    Args:
      program: the program.
      outs: the numbers of the results.
      also: other values that are wanted.
      unknown: inputs that are not given. Equations with effects are needed, unless they depend on
        these.
    """
    return _needed(program, outs, also, unknown)[0]


def needed_inputs(program: Program, outs: Iterable[int]) -> set[Value]:
    """Return the inputs of a program that some of its results need."""
    return _needed(program, outs)[1] & set(program.inputs)


def _needed(
    program: Program,
    outs: Iterable[int],
    also: Collection[Value] = (),
    unknown: Collection[Value] = (),
) -> tuple[Made, set[Value]]:
    later = set(unknown)
    for eq in program.equations if unknown else ():
        if not later.isdisjoint(eq.values):
            later.update(eq.outputs)
    needed = {v for i in outs if isinstance(v := program.outputs[i], Value)}.union(also)
    equations: Made = {}
    for eq in reversed(program.equations):
        is_due = eq.has_effects and later.isdisjoint(eq.values)
        if is_due or not needed.isdisjoint(eq.outputs):
            equations[eq] = made = made_for(eq, needed)
            needed.update(operands_of(eq, made))
    return dict(reversed(equations.items())), needed


def light_results(
    program: Program,
    wanted: Iterable[int],
    rest: Iterable[int],
    *,
    also: Collection[Value] = (),
    carried: Collection[Value] = (),
    without: Collection[Value] = (),
) -> list[int]:
    """Return the numbers of the results that are light.

    Args:
      program: the program.
      wanted, rest: the numbers of the results that are wanted, and of those to look at.
      also: other values that are wanted.
      carried: the inputs that must be kept, as other values, for who reads them later.
      without: the inputs that are not known where the wanted results are computed.
    """
    made = equations_for(program, wanted, also=also)
    makers = {
        v: (eq, i)
        for eq in program.equations
        for i, v in enumerate(eq.outputs)
        if i not in made.get(eq, ())
    }
    found = []
    for i in rest:
        value = program.outputs[i]
        if not isinstance(value, Value) or value in program.inputs:
            continue
        if value not in makers:
            found.append(i)
            continue
        roots = _roots_of(value, makers)
        if roots is None or not roots.isdisjoint(without):
            continue
        kept = [v for v in roots if v in carried or v not in program.inputs]
        if bytes_of(value) < sum(map(bytes_of, kept)):
            found.append(i)
    return found


def _roots_of(value: Value, makers: Mapping[Value, tuple[Equation, int]]) -> set[Value] | None:
    """Return what light equations compute a value from; None if others are needed for it."""
    roots: set[Value] = set()
    seen, stack = {value}, [value]
    while stack:
        value = stack.pop()
        if value not in makers:
            roots.add(value)
            continue
        eq, number = makers[value]
        if eq.name not in LIGHT and eq.name != BARRIER:
            return None
        more = {*operands_of(eq, [number])} - seen
        seen |= more
        stack += more
    return roots


def talks(eq: Equation, platform: str) -> bool:
    """Whether an equation, or one inside it, is a collective."""
    visits = walk(Program((), (eq,), ()), platform)
    return any(visit.equation.name in COLLECTIVES for visit in visits)
