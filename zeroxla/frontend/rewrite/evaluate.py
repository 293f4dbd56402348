"""Runs a program with what a search has found in the place of equations.

Loops and `jax.checkpoint` bodies stay what they are, with other equations inside. What is no longer
needed, such as a mask of all pairs of positions, is not computed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import jax

from zeroxla.frontend.rewrite.found import Rewritten
from zeroxla.program import compat
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Value, read

Env = MutableMapping[Value, Any]


def evaluate(found: Rewritten, args: Sequence[Any], around: Env | None = None) -> list[Any]:
    """Evaluate on arrays.

    Args:
      found: the program.
      args: one array for each of its inputs; those that it does not read may be None.
      around: the values of the programs around it.
    """
    env: Env = ChainMap({}, *([] if around is None else [around]))
    env.update(zip(found.program.inputs, args, strict=True))
    for eq in found.order:
        if eq in found.replaced:
            made = found.replaced[eq]
            with compat.context_of(eq.source, eq.name_stack):
                results = made.run([read(env, x) for x in made.inputs])
            env.update(zip(made.outputs, results, strict=True))
        elif eq in found.bodies:
            with compat.context_of(eq.source, eq.name_stack):
                results = _body(eq, found.bodies[eq], env)
            env.update(zip(eq.outputs, results, strict=True))
        else:
            inputs = [read(env, x) for x in eq.inputs]
            env.update(zip(eq.outputs, compat.call_equation(eq.source, eq.name_stack, inputs)))
    return [read(env, x) for x in found.program.outputs]


def _body(eq: Equation, body: Rewritten, env: Env) -> list[Any]:
    pairs = zip(body.program.inputs, eq.inputs, strict=True)
    if eq.name != "scan":
        args = [read(env, x) if v in body.read else None for v, x in pairs]
        params = eq.params
        return jax.checkpoint(
            lambda args: evaluate(body, args, env),
            prevent_cse=params["prevent_cse"],
            policy=params["policy"],
        )(args)
    scan = Scan(eq)
    is_const = [True] * scan.num_consts + [False] * (len(eq.inputs) - scan.num_consts)
    args = [
        read(env, x) if v in body.read or not const else None
        for (v, x), const in zip(pairs, is_const, strict=True)
    ]
    consts, carry, xs = scan.split_inputs(args)

    def turn(carry: list[Any], xs: list[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return scan.split_outputs(evaluate(body, [*consts, *carry, *xs], env))

    carry, ys = scan.run(turn, list(carry), list(xs))
    return [*carry, *ys]
