"""Barriers that keep XLA from making an activation a second time from a gathered leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import lax

from zeroxla.program.primitives import NEVER_FUSED
from zeroxla.program.trace import Program, Value, read, run


def with_barriers(program: Program, leaves: Collection[Value]) -> Callable[..., list[jax.Array]]:
    """Return a function that evaluates `program` with barriers behind some of its values.

    `values_behind_barriers` says which values these are.
    """
    barred = values_behind_barriers(program, leaves)

    def evaluate(*args: jax.Array) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
        for eq in program.equations:
            run([eq], env)
            env.update((v, lax.optimization_barrier(env[v])) for v in eq.outputs if v in barred)
        return [read(env, operand) for operand in program.outputs]

    return evaluate


def values_behind_barriers(program: Program, leaves: Collection[Value]) -> frozenset[Value]:
    """Return the activations that are made once, and read through a barrier.

    XLA fuses `h + bias` into its readers and makes it again in backward. The gathered bias, and
    with it the wire of its whole unit, would stay alive from forward to backward. So the result of
    an equation that reads a leaf gets a barrier, with two exceptions. If all its readers read
    leaves too, their results get one instead. If no result of the program follows from it through
    equations that XLA may fuse, it needs none.
    """
    fusible = [eq for eq in program.equations if eq.name not in NEVER_FUSED]
    wanted = {v for v in program.outputs if isinstance(v, Value)}
    needed = set(wanted)
    for eq in reversed(fusible):
        if not needed.isdisjoint(eq.outputs):
            needed.update(eq.values)
    model: set[Value] = set(leaves)
    made_from_leaf: set[Value] = set()
    for eq in fusible:
        if eq.values and model.issuperset(eq.values):
            model.update(eq.outputs)
        elif not model.isdisjoint(eq.values):
            made_from_leaf.update(eq.outputs)
        elif not needed.isdisjoint(eq.outputs):
            wanted.update(eq.values)
    return frozenset(made_from_leaf & wanted & needed)
