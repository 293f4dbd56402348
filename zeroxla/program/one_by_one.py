"""Evaluates a function's results one after another, so that their intermediates never coexist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from zeroxla.program.trace import Value, closure, read, run, trace

# Results smaller than this wait for no other: a barrier each would only lengthen the program.
_MIN_ELEMENTS = 2**16


def one_after_another(
    fun: Callable[..., Any],
    finish: Callable[[int, jax.Array], jax.Array],
    *args: Any,
    only: Collection[int] | None = None,
) -> Any:
    """Return `fun(*args)`, each result computed from arguments that wait for the large one before.

    A model's init draws every leaf from its own random bits. Left to the compiler, the draws of
    many leaves run at once and their intermediates, several times the leaf, add up.

    Args:
      fun: a function of arrays; what its results share is computed again for each.
      finish: `finish(i, x)` turns the i-th flat result into what is returned, before the next
        begins.
      *args: its arguments.
      only: the flat results that are computed, all if None; the others are None.
    """
    program, tree = trace(fun, *args)
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    inputs = jax.tree.leaves(args)
    results = []
    for i, atom in enumerate(program.outputs):
        if only is not None and i not in only:
            results.append(None)
            continue
        env = dict(zip(program.inputs, inputs, strict=True))
        run(closure([atom] if isinstance(atom, Value) else [], producers)[0], env)
        result = finish(i, jax.numpy.asarray(read(env, atom)))
        if result.size >= _MIN_ELEMENTS:
            *inputs, result = jax.lax.optimization_barrier((*inputs, result))
        results.append(result)
    return tree.unflatten(results)
