"""Adapters in the form in which a state stores them: new ones, and those that change nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zeroxla.frontend.lora.leaf_plan import BASE, LORA, LoraPlan
from zeroxla.mesh.batches import put_key
from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.disk_array import in_memory
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.state import TrainState

Places = dict[Path, tuple[Placement, NamedSharding]]


def fresh_adapters(
    plan: LoraPlan,
    mesh: Mesh,
    key: jax.Array,
    shapes: TrainState,
    base_leaf: Callable[[Path], jax.Array],
) -> dict[Path, jax.Array]:
    """Return new adapters, by their paths in the state.

    Args:
      plan: the model's plan.
      mesh: the mesh of the state.
      key: a PRNG key.
      shapes: the shapes of the state, with shardings.
      base_leaf: returns a leaf of the base as the state stores it, by its path in the base.

    Cost: with DoRA a device holds each leaf with an adapter whole for a moment.
    """
    places = _places(shapes)
    drawn = {path: places[path] for path in places if path[0] == LORA and path[-1] != "m"}

    @functools.partial(jax.jit, out_shardings=[sharding for _, sharding in drawn.values()])
    def make(key: jax.Array) -> list[jax.Array]:
        fresh = dict(paths_of({LORA: without_magnitudes.fresh_adapters(key, _no_leaf)}))
        return [placement.stored(fresh[path]) for path, (placement, _) in drawn.items()]

    without_magnitudes = dataclasses.replace(plan, dora=False)
    made = dict(zip(drawn, make(put_key(key, mesh)), strict=True))
    return made | _base_magnitudes(plan, places, base_leaf)


def without_adapters(state: TrainState, plan: LoraPlan) -> TrainState:
    """Return a state whose adapters change nothing, with the same arrays as base: A and B are zero,
    and DoRA's magnitudes are those of the base.

    Args:
      state: a state of a model with adapters.
      plan: the model's plan.

    Cost: as of `fresh_adapters`.
    """
    flat = dict(paths_of(state.params))
    magnitudes = _base_magnitudes(plan, _places(state), lambda path: in_memory(flat[BASE, *path]))
    leaves = [
        magnitudes[path] if path in magnitudes else x if path[0] == BASE else jnp.zeros_like(x)
        for path, x in flat.items()
    ]
    params = jax.tree.unflatten(jax.tree.structure(state.params), leaves)
    return dataclasses.replace(state, params=params)


def _places(state: TrainState) -> Places:
    return {
        path: (placement, x.sharding)
        for (path, x), placement in zip(paths_of(state.params), state.placements[0], strict=True)
    }


def _base_magnitudes(
    plan: LoraPlan, places: Places, base_leaf: Callable[[Path], jax.Array]
) -> dict[Path, jax.Array]:
    """Return the magnitudes with which leaves are the base's own, one after another."""
    if not plan.dora:
        return {}
    made: dict[Path, jax.Array] = {}
    for path in plan.targets:
        name = (LORA, *path, "m")
        made[name] = _base_magnitude(
            base_leaf(path),
            plan=plan,
            path=path,
            base=places[BASE, *path][0],
            placement=places[name][0],
            sharding=places[name][1],
        )
        made[name].block_until_ready()  # the leaf's temporaries are freed before the next one's
    return made


@functools.partial(jax.jit, static_argnames=("plan", "path", "base", "placement", "sharding"))
def _base_magnitude(
    x: jax.Array,
    *,
    plan: LoraPlan,
    path: Path,
    base: Placement,
    placement: Placement,
    sharding: NamedSharding,
) -> jax.Array:
    norms = plan.base_magnitudes(path, base.natural(to_device(x)))
    return put(placement.stored(norms), sharding)


def _no_leaf(path: Path) -> Any:
    raise AssertionError(f"{'/'.join(path)}: factors do not depend on the base")
