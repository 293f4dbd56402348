"""The programs inside a program's equations (loops, branches, `shard_map`), and a walk through all.

Readers that only look at each equation use `walk`. Readers that carry something along, such as
dims, arrays or a clock, go through a program themselves and open its equations with `bodies`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from zeroxla.program import compat
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, flatten

Branches = tuple[tuple[int, int], ...]
"""Branches that an equation is in, outermost first: (number of the conditional, which branch)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """An equation as a walk meets it.

    Attributes:
      equation: the equation.
      path: its scopes and name, below the scopes and names of the equations around it.
      count: how often it runs; every branch counts as taken, a `while` loop as one turn.
      branches: the branches that it is in.
    """

    equation: Equation
    path: str
    count: int
    branches: Branches


def walk(program: Program, platform: str) -> Iterator[Visit]:
    """Yield all equations of a program in order, each one before those inside it.

    Args:
      program: the program.
      platform: "cpu", "gpu" or "tpu"; see `compat.branches_for`.
    """
    conditionals = itertools.count()

    def visit(program: Program, path: str, count: int, branches: Branches) -> Iterator[Visit]:
        for eq in program.equations:
            here = scope_path(eq, path)
            yield Visit(equation=eq, path=here, count=count, branches=branches)
            if eq.name == "cond":
                which = next(conditionals)
                for i, branch in enumerate(compat.branches_for(eq.params, platform)):
                    yield from visit(body_of(branch), here, count, (*branches, (which, i)))
            for body, turns in bodies(eq):
                yield from visit(body, here, count * turns, branches)

    return visit(program, "", 1, ())


def bodies(eq: Equation) -> list[tuple[Program, int]]:
    """Return the programs inside an equation, branches aside, and how often each one runs.

    A `while` loop counts as one turn, because the number of its turns depends on data.
    """
    if eq.name == "scan":
        scan = Scan(eq)
        return [(body_of(scan.jaxpr), scan.length)]
    if eq.name == "while":
        return [(body_of(eq.params["body_jaxpr"]), 1)]
    if eq.name == "shard_map":
        return [(body_of(eq.params["jaxpr"]), 1)]
    return []


def body_of(jaxpr: Any) -> Program:
    """Return the flat program of a body, with custom rules and `jax.checkpoint` bodies inlined."""
    return flatten(jaxpr, compat.forward_jaxpr)


def local_of(program: Program) -> Program:
    """Return the program that each device runs, the body of a program's first `shard_map`. Of a
    training step it computes the gradients."""
    mapped = next(eq for eq in program.equations if eq.name == "shard_map")
    return body_of(mapped.params["jaxpr"])


def scope_path(eq: Equation, around: str) -> str:
    """Return the path of an equation: the scopes around its program, its own, and its name."""
    return "/".join(filter(None, (around, str(eq.name_stack), eq.name)))
