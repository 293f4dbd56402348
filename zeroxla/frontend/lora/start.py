"""Starts a model with adapters from given weights: the base is stored as `lora` was told, and the
adapters are new."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroxla.config.wire_format import WireFormat
from zeroxla.frontend.base import Tree
from zeroxla.frontend.lora.at_rest import as_wires
from zeroxla.frontend.lora.leaf_plan import BASE, LORA, LoraPlan
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.mesh.batches import put_key
from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.disk_array import given_for
from zeroxla.program import compat
from zeroxla.program.paths import Path, paths_of


class StateMaker(Protocol):
    """The part of a `zeroxla.Step` that makes a state from given weights."""

    mesh: Mesh

    def shapes(self) -> Any:
        """Return the shapes and shardings of the state, for the batch that was seen last."""
        ...

    def init_from(self, params: Any, key: jax.Array, model_state: Any = None) -> Any:
        """Return the state with these parameters and this model state."""
        ...


def starting_params(
    plan: LoraPlan, step: StateMaker, read: Callable[[Path], Any], key: jax.Array
) -> Tree:
    """Return the parameters for `Step.init_from`, made from given weights: stored arrays, or
    functions that return them.

    Args:
      plan: the plan of the step's model.
      step: a step that has seen a batch.
      read: returns a leaf of the model without adapters, with padding or without. It is called for
        one leaf after another, perhaps later.
      key: the PRNG key of the adapters.
    """
    shapes = step.shapes()
    wanted = paths_of(shapes.params)
    places = {path: place for (path, _), place in zip(wanted, shapes.placements[0], strict=True)}
    targets = dict(wanted)
    made: dict[Path, Any] = {
        (BASE, *path): given_for(
            targets[BASE, *path],
            functools.partial(
                _base_leaf, plan, path, read, x.shape, places[BASE, *path], targets[BASE, *path]
            ),
        )
        for path, x in paths_of(plan.shapes)
    }
    made |= _adapters(plan, step, key, places, targets)
    leaves = [made[path] for path, _ in wanted]
    return jax.tree.unflatten(jax.tree.structure(shapes.params), leaves)


def _base_leaf(
    plan: LoraPlan,
    path: Path,
    read: Callable[[Path], Any],
    shape: tuple[int, ...],
    place: Placement,
    target: Any,
) -> jax.Array:
    """Return a leaf with the natural shape `shape` in its stored form."""
    x = read(path)
    if x.shape == target.shape and x.dtype == target.dtype:
        return jax.device_put(x, target.sharding)
    leaf, format = plan.dense.get(path), plan.format(path)
    return _store(x, shape=shape, leaf=leaf, format=format, place=place, sharding=target.sharding)


@functools.partial(jax.jit, static_argnames=("shape", "leaf", "format", "place", "sharding"))
def _store(
    x: jax.Array,
    *,
    shape: tuple[int, ...],
    leaf: DenseLeaf | None,
    format: WireFormat | None,
    place: Placement,
    sharding: jax.sharding.NamedSharding,
) -> jax.Array:
    values = x[tuple(slice(n) for n in shape)].astype(jnp.float32)  # without padding
    if leaf is not None and format is not None:
        values = as_wires(values, leaf, format)
    return compat.with_layout(place.stored(values), sharding)


def _adapters(
    plan: LoraPlan,
    step: StateMaker,
    key: jax.Array,
    places: Mapping[Path, Placement],
    targets: Mapping[Path, Any],
) -> dict[Path, jax.Array]:
    """Return new adapters as the state stores them."""
    paths = [path for path in targets if path[0] == LORA]

    @functools.partial(jax.jit, out_shardings=[targets[path].sharding for path in paths])
    def make(key: jax.Array) -> list[jax.Array]:
        fresh = dict(paths_of({LORA: plan.fresh_adapters(key)}))
        return [places[path].stored(fresh[path]) for path in paths]

    return dict(zip(paths, make(put_key(key, step.mesh)), strict=True))


def check_given(plan: LoraPlan, params: Any) -> None:
    """Check that parameters belong to the model without adapters; padding is allowed.

    Raises:
      ValueError: a leaf is missing, unknown or too small.
    """
    have, want = shapes_of(params), shapes_of(plan.shapes)
    for path in sorted(have.keys() | want.keys()):
        mine, own = have.get(path), want.get(path)
        holds = mine is not None and own is not None and len(mine) == len(own)
        if not holds or any(n < m for n, m in zip(mine or (), own or ())):
            raise ValueError(
                f"the parameters are of another model: {'/'.join(path)} has the shape {mine}, and "
                f"the model's own is {own}; give those of the model without adapters, such as the "
                "params of its state"
            )


def check_adapted(plan: LoraPlan, have: Mapping[Path, Sequence[int]], what: str) -> None:
    """Check that shapes belong to a base and its adapters.

    Args:
      plan: the model's plan.
      have: natural shapes, by path.
      what: the owner of the shapes, for the message.

    Raises:
      ValueError: a leaf is missing, unknown or has another shape.
    """
    want = plan.stored_shapes()
    for path in sorted(want.keys() | have.keys()):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"{what} is not of this model with adapters: {'/'.join(path)} has the shape "
                f"{have.get(path)}, and that of the model is {want.get(path)}; give natural shapes "
                "of a base and its adapters, as zeroxla.full_params returns them"
            )


def shapes_of(params: Any) -> dict[Path, tuple[int, ...]]:
    """Return the shape of each leaf by path."""
    return {path: tuple(x.shape) for path, x in paths_of(params)}
