"""Making what follows from a leaf once, so that XLA does not keep the leaf to make it again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import lax

from zeroxla.program.primitives import NEVER_FUSED
from zeroxla.program.trace import Program, Value, read, run


def hold(program: Program, leaves: Collection[Value]) -> Callable[..., list[jax.Array]]:
    """Return what evaluates `program`, some of its values behind a barrier; see `held_values`."""
    held = held_values(program, leaves)

    def evaluate(*args: jax.Array) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
        for eq in program.equations:
            run([eq], env)
            env.update((v, lax.optimization_barrier(env[v])) for v in eq.outputs if v in held)
        return [read(env, atom) for atom in program.outputs]

    return evaluate


def held_values(program: Program, leaves: Collection[Value]) -> frozenset[Value]:
    """Return the activations that are made once, behind a barrier.

    XLA fuses `h + bias` into whatever reads it and makes it again in backward: the gathered bias,
    and with it the wire of its whole unit, would stay alive from forward to backward. So the result
    of an equation that reads a leaf is held. Two exceptions: where all its readers read leaves too,
    theirs are held; and where no result of the program follows from it by what XLA may fuse.
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
