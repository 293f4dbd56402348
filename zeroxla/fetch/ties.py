"""Ties: data dependences that keep the compiler from moving a collective.

A tie is an `optimization_barrier`: its results exist only after all its inputs do. XLA keeps
barriers until it has made its schedule, so a tie bounds how early a collective may start.

XLA removes a barrier's input if nothing else reads it and nothing reads its output. So a value that
others are tied to must be read through the barrier, or have another reader.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.offload.memory_kinds import is_on_host


def tie(arrays: Sequence[Any], to: Sequence[Any], *, by_data: bool) -> tuple[list[Any], list[Any]]:
    """Make `arrays` wait for `to`: none of them exists before all of `to` do.

    Whoever reads `to` afterwards must read what is returned for it.

    Args:
      arrays: the arrays that wait. An entry may be None, here and in `to`; it stays None.
      to: the arrays that they wait for.
      by_data: also compute `arrays` from `to`, except for arrays in host memory. XLA's CPU backend
        needs this. It drops barriers before it runs a program, and starts what follows a loop once
        the loop has started. Collectives of the loop and collectives after it then meet, on each
        device in another order.

    Returns:
      `arrays` and `to`, tied.
    """
    arrays, to = list(arrays), list(to)
    if all(x is None for x in arrays) or all(x is None for x in to):
        return arrays, to
    both = [*arrays, *to]
    tied = iter(lax.optimization_barrier([x for x in both if x is not None]))
    both = [None if x is None else next(tied) for x in both]
    arrays, to = both[: len(arrays)], both[len(arrays) :]
    if by_data:
        never = _never([x for x in to if x is not None and not is_on_host(x)])
        arrays = [
            x if x is None or is_on_host(x) else jnp.where(never, jnp.zeros_like(x), x)
            for x in arrays
        ]
    return arrays, to


def _never(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return False, computed from one element of each array. XLA does not know that it is False."""
    numbers = [x for x in arrays if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    firsts = [x[(0,) * x.ndim].real.astype(jnp.float32) for x in numbers]
    return functools.reduce(
        jnp.logical_or, [jnp.isnan(x) & jnp.isinf(x) for x in firsts], jnp.zeros((), bool)
    )
