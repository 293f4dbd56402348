"""The pullbacks of functions with a derivative of their own, and what such a one may not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from zeroxla.program import compat
from zeroxla.program.trace import Equation, is_float


def pullback_of(eqn: Any) -> Any:
    """Return the jaxpr of the pullback of an equation, which takes the equation's operands and has
    the cotangents of its floating arguments as results."""
    avals = [v.aval for v in eqn.invars]
    first_argument = compat.custom_rule_constants(eqn)
    floats = [i for i, x in enumerate(avals) if is_float(x.dtype) and i >= first_argument]

    def pullback(args: Sequence[Any]) -> Any:
        def call(*some: Any) -> list[Any]:
            every = list(args)
            for i, x in zip(floats, some, strict=True):
                every[i] = x
            results = compat.call_equation(eqn, compat.name_stack_of(eqn), every)
            return [x for x in results if is_float(x.dtype)]

        results, pull = jax.vjp(call, *(args[i] for i in floats))
        return pull([jnp.ones_like(x) for x in results])

    return jax.make_jaxpr(pullback)([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals])


def check_rules(equations: Iterable[Equation]) -> None:
    """Check that no rule closes over an array that the model computes.

    JAX calls a rule when the program is differentiated. An array of the trace that the program was
    found in is gone then, and would show as an escaped tracer when the step is called.

    Raises:
      ValueError: a rule does.
    """
    for eq in equations:
        for eqn in compat.closing_rules(eq.source):
            if any(isinstance(x, Tracer) for x in _constants(pullback_of(eqn))):
                raise ValueError(
                    f"the function {compat.rule_and_line(eqn)} has a derivative of its own "
                    "(custom_vjp), whose rule closes over an array that the model computes. JAX "
                    "runs the rule when that array is gone, as in jax.grad(jax.jit(f)); give the "
                    "function that array as an argument, or make it with NumPy if it is a constant"
                )


def _constants(jaxpr: Any) -> Iterator[Any]:
    """Yield the constants of a jaxpr and of those within it."""
    opened, consts = compat.open_jaxpr(jaxpr)
    yield from consts
    for eqn in opened.eqns:
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=compat.is_jaxpr):
            if compat.is_jaxpr(value):
                yield from _constants(value)
