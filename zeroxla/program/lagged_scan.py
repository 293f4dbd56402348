"""Loops whose turns leave a rest, which is finished beside the computation of the next turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.scan import Scan

Turn = Callable[[Any, Any], tuple[Any, Any, Any]]
"""(carry, slices of `xs`) -> (carry, results to stack, rest)."""


def run_with_lag(
    scan: Scan, turn: Turn, finish: Callable[[Any], Any], carry: Any, xs: Any, *, back: bool
) -> tuple[Any, Any, Any]:
    """Run another body in the place of a scan's, and finish each turn's rest one turn later.

    A compiler schedules one turn of a loop at a time. What is left at the end of a turn, such as
    the exchange of its results, has nothing to run beside in that turn, but all of the next one.
    The first turn stands before the loop, since no rest is there for it to finish. The program then
    holds the body twice.

    Args:
      scan: the scan of at least two turns, whose order and unrolling are kept.
      turn: the body; its rest is a pytree that the loop carries.
      finish: turns a rest into results to stack. It reads nothing that a turn computes.
      carry: a pytree; the first carry.
      xs: a pytree; its arrays are sliced along dim 0.
      back: whether to take the turns in the opposite order.

    Returns:
      The last carry, the stacked results, and the stacked results of `finish`.
    """
    length = scan.length
    backwards = scan.reverse != back

    def place(number: Any) -> Any:
        return length - 1 - number if backwards else number

    def slices(at: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, at, keepdims=False), xs)

    def put(stacks: Any, results: Any, at: Any) -> Any:
        return jax.tree.map(
            lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, at, 0), stacks, results
        )

    def stacks_of(results: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), results)

    first = place(0)
    carry, ys, rest = turn(carry, slices(first))
    stacked = put(stacks_of(ys), ys, first)
    finished = stacks_of(jax.eval_shape(finish, rest))

    def later(carried: Any, number: jax.Array) -> tuple[Any, None]:
        carry, rest, stacked, finished = carried
        finished = put(finished, finish(rest), place(number - 1))
        carry, ys, rest = turn(carry, slices(place(number)))
        return (carry, rest, put(stacked, ys, place(number)), finished), None

    unroll = scan.equation.params["unroll"]
    start = (carry, rest, stacked, finished)
    (carry, rest, stacked, finished), _ = lax.scan(
        later, start, jnp.arange(1, length), unroll=unroll
    )
    return carry, stacked, put(finished, finish(rest), place(length - 1))
