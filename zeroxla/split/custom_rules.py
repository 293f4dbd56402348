"""Custom derivatives as two programs, so that they can be followed and run on parts.

A `custom_jvp` or `custom_vjp` equation is differentiated once, whole, as its own rule says. That
gives a forward program, which also returns what backward needs, and a backward program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from zeroxla.program import compat
from zeroxla.program.rules import check_rules
from zeroxla.program.trace import Equation, Operand, Program, Value, trace

Runs = Callable[[Sequence[jax.Array]], list[jax.Array]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CustomRule:
    """The programs of an equation with a derivative of its own.

    Attributes:
      forward: operands -> (results, what backward needs).
      backward: (what backward needs, cotangents of the floating results) -> cotangents of the
        floating operands.
      targets: the positions of the floating operands, without values that the function closes
        over: no gradient reaches these.
      outputs: the positions of the floating results.
    """

    forward: Program
    backward: Program
    targets: tuple[int, ...]
    outputs: tuple[int, ...]

    @staticmethod
    def of(eq: Equation) -> CustomRule:
        """Differentiate an equation. Nothing is left in the programs that has another derivative
        than its own: they are not differentiated again."""
        shapes = [
            jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in map(_as_value, eq.inputs)
        ]
        check_rules((eq,))
        first_argument = compat.custom_rule_constants(eq.source)
        operands = enumerate(map(_as_value, eq.inputs))
        targets = tuple(i for i, x in operands if x.is_float and i >= first_argument)
        outputs = tuple(i for i, v in enumerate(eq.outputs) if v.is_float)
        tree = None

        def forward(*args: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            nonlocal tree

            def call(*floats: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
                filled = list(args)
                for i, x in zip(targets, floats, strict=True):
                    filled[i] = x
                found = compat.call_equation(eq.source, eq.name_stack, filled)
                return [found[i] for i in outputs], found

            _, pullback, found = jax.vjp(call, *(args[i] for i in targets), has_aux=True)
            residuals, tree = jax.tree.flatten(pullback)
            return found, residuals

        first, _ = trace(forward, *shapes, opened=compat.forward_jaxpr)
        kept = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in _tail(first, eq)]
        cts = [
            jax.ShapeDtypeStruct(eq.outputs[i].aval.shape, eq.outputs[i].aval.dtype)
            for i in outputs
        ]

        def backward(residuals: list[jax.Array], cts: list[jax.Array]) -> tuple[jax.Array, ...]:
            return jax.tree.unflatten(tree, residuals)(cts)

        second, _ = trace(backward, kept, cts, opened=compat.forward_jaxpr)
        return CustomRule(first, second, targets, outputs)

    def run(self, forward: Runs, backward: Runs, args: Sequence[jax.Array]) -> list[jax.Array]:
        """Run two programs in the place of these, as an equation with a derivative of its own."""
        num_results = len(self.forward.outputs) - (len(self.backward.inputs) - len(self.outputs))

        @jax.custom_vjp
        def call(*args: jax.Array) -> list[jax.Array]:
            return forward(args)[:num_results]

        def first(*args: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            found = forward(args)
            return found[:num_results], found[num_results:]

        def second(
            residuals: list[jax.Array], cts: list[jax.Array]
        ) -> tuple[jax.Array | None, ...]:
            found = backward([*residuals, *(cts[i] for i in self.outputs)])
            by_operand = dict(zip(self.targets, found, strict=True))
            return tuple(by_operand.get(i) for i in range(len(args)))

        call.defvjp(first, second)
        return call(*args)


def _tail(program: Program, eq: Equation) -> Sequence[Value]:
    """Return the results of a forward program that backward needs."""
    return [_as_value(x) for x in program.outputs[len(eq.outputs) :]]


def _as_value(operand: Operand) -> Value:
    return operand if isinstance(operand, Value) else Value(jax.typeof(operand.value))
