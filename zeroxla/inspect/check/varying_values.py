"""Along which mesh axes the values of a per-device program differ between devices.

A conditional or a loop whose decision differs between devices lets them go different ways. If these
ways hold collectives, devices wait for others that never come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from zeroxla.program import compat
from zeroxla.program.primitives import COLLECTIVES, HLO_KINDS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program
from zeroxla.program.walk import bodies, body_of

Axes = frozenset[str]
"""The axes along which a value differs."""

_NONE: Axes = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """A `cond` or `while` equation with collectives whose decision differs between devices.

    Attributes:
      equation: the equation.
      axes: the axes of its collectives along which the decision differs.
      collectives: the collectives of each branch; of a loop, those of one turn.
    """

    equation: Equation
    axes: Axes
    collectives: tuple[tuple[str, ...], ...]

    @property
    def differs(self) -> bool:
        """Whether devices that decide differently run different collectives."""
        return self.equation.name == "while" or len(set(self.collectives)) > 1


def find_partings(program: Program, inputs: Sequence[Axes], platform: str) -> list[Parting]:
    """Return the conditionals and loops at which devices part and collectives would not meet.

    Args:
      program: the program of one device, the body of a `shard_map`.
      inputs: the axes along which each input differs.
      platform: see `compat.branches_for`.
    """
    reader = _Reader(platform)
    reader.read(program, inputs)
    return list(reader.found.values())


def collectives_of(program: Program, platform: str) -> Iterator[tuple[str, Axes]]:
    """Yield the collectives of a program in order, those of its bodies and branches included, as
    (words, axes)."""
    for eq in program.equations:
        if eq.name in COLLECTIVES:
            axes = axes_of(eq)
            shapes = ", ".join(a.aval.str_short() for a in eq.values)
            yield f"{eq.name} of {shapes} over {'+'.join(sorted(axes))}", axes
        for body in _inside(eq, platform):
            yield from collectives_of(body, platform)


def axes_of(eq: Equation) -> Axes:
    """Return the mesh axes that a collective goes over."""
    names = eq.params.get("axis_name", eq.params.get("axes", ()))
    names = names if isinstance(names, tuple | list | frozenset) else (names,)
    return frozenset(name for name in names if isinstance(name, str))


def _inside(eq: Equation, platform: str) -> list[Program]:
    programs = [body for body, _ in bodies(eq)]
    if eq.name == "while":
        programs.append(body_of(eq.params["cond_jaxpr"]))
    if eq.name == "cond":
        programs += map(body_of, compat.branches_for(eq.params, platform))
    return programs


class _Reader:
    """Follows the axes through a program.

    Attributes:
      found: the partings, by their equation in JAX's own program: a loop's body is read several
        times, until nothing changes.
    """

    def __init__(self, platform: str) -> None:
        self._platform = platform
        self.found: dict[int, Parting] = {}

    def read(self, program: Program, inputs: Sequence[Axes]) -> list[Axes]:
        """Return the axes along which the outputs of a program differ."""
        env: dict[Any, Axes] = dict(zip(program.inputs, inputs, strict=True))

        def of(operand: Operand) -> Axes:
            return env.get(operand, _NONE)

        for eq in program.equations:
            results = self._results(eq, [of(a) for a in eq.inputs])
            env.update(zip(eq.outputs, results, strict=True))
        return [of(a) for a in program.outputs]

    def _results(self, eq: Equation, given: list[Axes]) -> list[Axes]:
        if eq.name == "scan":
            return self._scan(Scan(eq), given)
        if eq.name == "while":
            return self._while(eq, given)
        if eq.name == "cond":
            return self._cond(eq, given)
        together = _NONE.union(*given)
        if eq.name == "axis_index":
            return [axes_of(eq)]
        if eq.name in COLLECTIVES:
            same = HLO_KINDS.get(eq.name) in ("all-gather", "all-reduce")
            if same and eq.params.get("axis_index_groups") is None:
                if len(given) == len(eq.outputs):
                    return [axes - axes_of(eq) for axes in given]
                return [together - axes_of(eq)] * len(eq.outputs)
            return [together | axes_of(eq)] * len(eq.outputs)
        if eq.name == "optimization_barrier":
            return given
        return [together] * len(eq.outputs)

    def _scan(self, scan: Scan, given: list[Axes]) -> list[Axes]:
        body = scan.body(compat.forward_jaxpr)
        consts, carry, xs = map(list, scan.split_inputs(given))
        while True:
            results = self.read(body, [*consts, *carry, *xs])
            last, ys = scan.split_outputs(results)
            grown = [a | b for a, b in zip(carry, last, strict=True)]
            if grown == carry:
                return [*carry, *ys]
            carry = grown

    def _while(self, eq: Equation, given: list[Axes]) -> list[Axes]:
        params = eq.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = given[:num_cond], given[num_cond : num_cond + num_body]
        carry = given[num_cond + num_body :]
        cond, body = body_of(params["cond_jaxpr"]), body_of(params["body_jaxpr"])
        while True:
            (decision,) = self.read(cond, [*of_cond, *carry])
            last = self.read(body, [*of_body, *carry])
            grown = [a | b | decision for a, b in zip(carry, last, strict=True)]
            if grown == carry:
                break
            carry = grown
        self._note(eq, decision, [body, cond])
        return carry

    def _cond(self, eq: Equation, given: list[Axes]) -> list[Axes]:
        decision, *operands = given
        programs = [body_of(b) for b in compat.branches_for(eq.params, self._platform)]
        if len(programs) == 1:
            decision = _NONE
        results = [self.read(program, operands) for program in programs]
        self._note(eq, decision, programs)
        return [decision.union(*axes) for axes in zip(*results, strict=True)]

    def _note(self, eq: Equation, decision: Axes, programs: Sequence[Program]) -> None:
        found = [list(collectives_of(program, self._platform)) for program in programs]
        axes = decision & _NONE.union(*(axes for of in found for _, axes in of))
        if axes:
            words = tuple(tuple(text for text, _ in of) for of in found)
            self.found[id(eq.source)] = Parting(equation=eq, axes=axes, collectives=words)
