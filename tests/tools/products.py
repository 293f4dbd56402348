"""Counts the work of matrix products."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zeroxla.program import compat
from zeroxla.program.trace import trace


def products(fun: Callable[..., Any], *args: Any) -> int:
    """Count the multiplications of the matrix products of a function, those in loops each turn."""
    program, _ = trace(fun, *args, opened=compat.backward_jaxpr)

    def count(program: Any) -> int:
        total = 0
        for eq in program.equations:
            if eq.name == "dot_general":
                ((summed, _), _) = eq.params["dimension_numbers"]
                inner = [eq.inputs[0].aval.shape[d] for d in summed]
                total += int(np.prod([*eq.outputs[0].aval.shape, *inner]))
            elif eq.name == "scan":
                body = compat.open_jaxpr(eq.params["jaxpr"])[0]
                inside = trace(
                    lambda *xs, body=body: jax.core.eval_jaxpr(body, (), *xs),
                    *(v.aval for v in body.invars),
                    opened=compat.backward_jaxpr,
                )[0]
                total += eq.params["length"] * count(inside)
        return total

    return count(program)
