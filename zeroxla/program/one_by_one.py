"""Evaluates a function's results one after another, so that their temporaries never coexist."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from zeroxla.program.trace import Value, closure, read, run, trace

# Nothing waits for a result with fewer elements: a barrier for each would lengthen the program.
_MIN_ELEMENTS = 2**16


def one_after_another(
    fun: Callable[..., Any],
    finish: Callable[[int, jax.Array], jax.Array],
    *args: Any,
    only: Collection[int] | None = None,
) -> Any:
    """Return `fun(*args)`, each result computed after the large results before it are done.

    A model's init draws every leaf from random bits of its own. Left to the compiler, the draws of
    many leaves run at once. Their temporaries, each several times the leaf, add up.

    Args:
      fun: a function of pytrees of arrays. An intermediate that several results share is computed
        again for each of them.
      finish: `finish(i, x)` is called with each flat result, before the next one begins. The value
        that it gives is returned in the result's place.
      *args: the function's arguments.
      only: the numbers of the flat results to compute; all if None. The others become None.
    """
    program, tree = trace(fun, *args)
    producers = {v: eq for eq in program.equations for v in eq.outputs}
    inputs = jax.tree.leaves(args)
    results = []
    for i, operand in enumerate(program.outputs):
        if only is not None and i not in only:
            results.append(None)
            continue
        env = dict(zip(program.inputs, inputs, strict=True))
        run(closure([operand] if isinstance(operand, Value) else [], producers)[0], env)
        result = finish(i, jax.numpy.asarray(read(env, operand)))
        if result.size >= _MIN_ELEMENTS:
            *inputs, result = jax.lax.optimization_barrier((*inputs, result))
        results.append(result)
    return tree.unflatten(results)
