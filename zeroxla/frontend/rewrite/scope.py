"""`TracedScope`: a program of a model, or of a loop's body, and what is known of programs around.

A value of a body may be one of the program around it: a loop's constant, or an operand of a
`jax.checkpoint` body. Through a scope it is followed there. Functions with a derivative of their
own (`jax.custom_jvp`), as JAX's softmax is in some versions, are looked into.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from zeroxla.program import compat
from zeroxla.program.trace import Constant, Equation, Operand, Program, Value, flatten

CUSTOM_JVP = "custom_jvp_call"


class TracedScope:
    """A program and the programs around it.

    Attributes:
      program: the program.
      outer: the scope around it; None if there is none.
      equations: its equations, and those in functions that it calls, in order.
      readers: the equations of the program that read each value; None stands for its outputs.
    """

    def __init__(
        self,
        program: Program,
        outer: TracedScope | None = None,
        known: Mapping[Value, Operand] | None = None,
    ) -> None:
        """Make a scope.

        Args:
          program: the program.
          outer: the scope around it.
          known: inputs of the program that are operands of the program around it.
        """
        self.program, self.outer = program, outer
        self._alias: dict[Value, Operand] = dict(known or {})
        self._producers: dict[Value, Equation] = {}
        self._calls: dict[Equation, Equation] = {}
        self._shown: dict[Operand, Value] = {}
        self._static: set[Value] = set()
        self.equations: list[Equation] = []
        self.readers: dict[Value, list[Equation | None]] = defaultdict(list)
        self._add(program.equations, None)
        for operand in program.outputs:
            if isinstance(operand, Value):
                self.readers[operand].append(None)

    def _add(self, equations: Iterable[Equation], call: Equation | None) -> None:
        for eq in equations:
            if call is not None:
                self._calls[eq] = call
            for v in eq.values:
                self.readers[v].append(eq)
            if eq.name != CUSTOM_JVP:
                self.equations.append(eq)
                self._producers.update((v, eq) for v in eq.outputs)
                if not eq.is_pinned and all(map(self.is_static, eq.inputs)):
                    self._static.update(eq.outputs)
                continue
            body = flatten(compat.forward_jaxpr(eq.source), compat.forward_jaxpr)
            self._alias.update(zip(body.inputs, eq.inputs, strict=True))
            self._alias.update(zip(eq.outputs, body.outputs, strict=True))
            self._shown.update((x, v) for v, x in zip(eq.outputs, body.outputs, strict=True))
            self._add(body.equations, call or eq)

    def resolve(self, operand: Operand) -> Operand:
        """Follow an operand to the value that it is, in this program or in one around it."""
        while isinstance(operand, Value):
            if operand in self._alias:
                operand = self._alias[operand]
            elif operand in self._producers or self.outer is None:
                return operand
            else:
                return self.outer.resolve(operand)
        return operand

    def producer(self, operand: Operand) -> Equation | None:
        """Return the equation that makes a resolved operand, in this program or one around it."""
        if not isinstance(operand, Value):
            return None
        found = self._producers.get(operand)
        return found if found or self.outer is None else self.outer.producer(operand)

    def is_own(self, eq: Equation) -> bool:
        """Return whether an equation is one of this program, or in a function that it calls."""
        return any(v in self._producers for v in eq.outputs)

    def call_of(self, eq: Equation) -> Equation:
        """Return the program's equation that an equation is inside of, or itself."""
        return self._calls.get(eq, eq)

    def visible(self, operand: Operand) -> Operand | None:
        """Return an operand as the program's own equations know it; None if it exists only inside
        a function that one of them calls."""
        operand = self.resolve(operand)
        while operand in self._shown:
            operand = self._shown[operand]
        eq = self.producer(operand)
        if eq is None or not self.is_own(eq):
            return operand if eq is None or self.outer is None else self.outer.visible(operand)
        return None if eq in self._calls else operand

    def is_static(self, operand: Operand) -> bool:
        """Return whether an operand follows from nothing but constants of the program."""
        operand = self.resolve(operand)
        if isinstance(operand, Constant) or operand in self._static:
            return True
        return self.outer is not None and self.outer.is_static(operand)
