"""`without_remat`: a loss without the `jax.checkpoint` calls of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zeroxla.program import compat
from zeroxla.program.primitives import REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import Equation, Program, read, trace


def without_remat(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes what `loss` does, and whose derivative keeps what backward
    reads. Bodies of loops are changed too; those of `cond` and `while` and of derivatives that the
    model wrote itself are not.

    Args:
      loss: a function of pytrees of arrays.
    """

    def plain(*args: Any) -> Any:
        program, result = trace(loss, *shapes_of(args), opened=_opened)
        return result.unflatten(_evaluate(program, jax.tree.leaves(args)))

    return plain


def _opened(eqn: Any) -> Any | None:
    """Return the body of a call or of a `jax.checkpoint`, which is inlined."""
    if eqn.primitive.name in REMATS:
        return eqn.params["jaxpr"]
    return compat.inlined_jaxpr(eqn)


def _evaluate(program: Program, args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(program.inputs, args, strict=True))
    for eq in program.equations:
        inputs = [read(env, operand) for operand in eq.inputs]
        if eq.name == "scan" and _has_remat(eq):
            with compat.context_of(eq.source, eq.name_stack):
                results = _run_loop(Scan(eq), inputs)
        else:
            results = compat.call_equation(eq.source, eq.name_stack, inputs)
        env.update(zip(eq.outputs, results, strict=True))
    return [read(env, operand) for operand in program.outputs]


def _has_remat(eq: Equation) -> bool:
    """Return whether a loop's body, or a loop inside, has a `jax.checkpoint`."""
    inside = Scan(eq).body().equations
    return any(e.name in REMATS or (e.name == "scan" and _has_remat(e)) for e in inside)


def _run_loop(scan: Scan, inputs: Sequence[Any]) -> list[Any]:
    body = scan.body(_opened)
    consts, carry, xs = scan.split_inputs(inputs)

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        carried, ys = scan.split_outputs(_evaluate(body, [*consts, *carry, *xs]))
        return list(carried), list(ys)

    carry, ys = scan.run(turn, list(carry), list(xs))
    return [*carry, *ys]
