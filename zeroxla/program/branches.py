"""`cond` and `while` equations: the programs that they run, and which operands these read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from zeroxla.program import compat
from zeroxla.program.trace import Equation, Opened, Program, flatten

_T = TypeVar("_T")


def branches_of(eq: Equation, opened: Opened = compat.forward_jaxpr) -> list[Program]:
    """Return the branches of a `cond`; see `trace` for `opened`.

    Its first operand is the number of the branch, and all branches read the others.
    """
    return [flatten(branch, opened) for branch in eq.params["branches"]]


@dataclasses.dataclass(frozen=True, slots=True)
class While:
    """A `while` equation.

    Its operands are the constants of its condition, those of its body, and the first carry.

    Attributes:
      equation: the equation.
    """

    equation: Equation

    def split_inputs(self, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
        """Cut a sequence in the operands' order into (constants of the condition, constants of the
        body, carry)."""
        first = self.equation.params["cond_nconsts"]
        second = first + self.equation.params["body_nconsts"]
        return values[:first], values[first:second], values[second:]

    def test(self, opened: Opened = compat.forward_jaxpr) -> Program:
        """Return the condition; it reads its constants and the carry."""
        return flatten(self.equation.params["cond_jaxpr"], opened)

    def body(self, opened: Opened = compat.forward_jaxpr) -> Program:
        """Return the body; it reads its constants and the carry, and returns the next carry."""
        return flatten(self.equation.params["body_jaxpr"], opened)
