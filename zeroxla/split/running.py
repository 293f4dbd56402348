"""Rules of running sums, products and maxima along a dim whose parts follow each other.

A part's own running sum is completed with the totals of the parts before it. The totals are
gathered, one element of the dim from each device.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, block, expand, is_split, pieces_of
from zeroxla.split.rules import Args, DimsOf, Rule, bind
from zeroxla.split.split_axis import SplitAxis

Combine = Callable[[jax.Array, jax.Array], jax.Array]

_COMBINE: dict[str, Combine] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def _connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Let the outermost factor of the dim be split: its parts are runs that follow each other."""
    dim = ins[0][eq.params["axis"]]
    first, *rest = expand(dim) or (None,)
    if first is None or pieces_of(first):
        block(dim, f"{eq.name} goes through it")
    else:
        first.reduced[f"{eq.name} goes through it"] = None
        block(tuple(rest), f"{eq.name} goes through it")
    return list(ins)


def _run(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    d, is_reverse = eq.params["axis"], eq.params["reverse"]
    (mine,) = bind(eq, args)
    if not is_split(dims[eq.inputs[0]][d]) or axis.name is None:
        return [mine]
    combine = _COMBINE[eq.name]
    totals = axis.shared(lax.index_in_dim(mine, 0 if is_reverse else -1, d))
    found = mine
    for i in range(axis.parts):
        counts = axis.index < i if is_reverse else axis.index > i
        found = jnp.where(counts, combine(found, totals[i]), found)
    return [found]


RUNNING_RULES = dict.fromkeys(_COMBINE, Rule(_connect, _run))
