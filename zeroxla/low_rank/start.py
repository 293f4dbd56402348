"""States on given weights: the base is stored as `lora` was told, the adapters are new."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zeroxla.adapters.base import Tree
from zeroxla.low_rank.plan import BASE, LORA, LoraPlan
from zeroxla.paths import Path, paths_of
from zeroxla.placement import Placement

if TYPE_CHECKING:
    from zeroxla.state import TrainState
    from zeroxla.step import Step


def start_from(plan: LoraPlan, step: Step, params: Any, key: jax.Array) -> TrainState:
    """Make a state of a model's own parameters; see `LoraModel.init_from`."""
    shapes = step.shapes()
    wanted = paths_of(shapes.params)
    places = {path: place for (path, _), place in zip(wanted, shapes.placements[0], strict=True)}
    targets = dict(wanted)
    natural = dict(paths_of(plan.shapes))
    given = dict(paths_of(params))
    _check_given(given, natural)
    made = {
        (BASE, *path): _base_leaf(plan, path, x, places[BASE, *path], targets[BASE, *path])
        for path, x in given.items()
    }
    made |= _adapters(plan, key, places, targets)
    leaves = [made[path] for path, _ in wanted]
    return step.init_from(jax.tree.unflatten(jax.tree.structure(shapes.params), leaves), key)


def _base_leaf(plan: LoraPlan, path: Path, x: Any, place: Placement, target: Any) -> jax.Array:
    """Return a leaf as the state stores it."""
    if x.shape == target.shape and x.dtype == target.dtype:
        return jax.device_put(x, target.sharding)
    shape = dict(paths_of(plan.shapes))[path].shape

    @functools.partial(jax.jit, out_shardings=target.sharding)
    def store(x: jax.Array) -> jax.Array:
        values = x[tuple(slice(n) for n in shape)].astype(np.float32)  # without padding
        return place.stored(plan.stored(path, values))

    return store(x)


def _adapters(
    plan: LoraPlan, key: jax.Array, places: Mapping[Path, Placement], targets: Mapping[Path, Any]
) -> dict[Path, jax.Array]:
    """Return new adapters as the state stores them."""
    paths = [path for path in targets if path[0] == LORA]

    @functools.partial(jax.jit, out_shardings=[targets[path].sharding for path in paths])
    def make(key: jax.Array) -> list[jax.Array]:
        fresh = dict(paths_of({LORA: plan.fresh_adapters(key)}))
        return [places[path].stored(fresh[path]) for path in paths]

    return dict(zip(paths, make(key), strict=True))


def _check_given(given: Mapping[Path, Any], natural: Mapping[Path, Any]) -> None:
    """Check that parameters are the model's own, padding aside."""
    for path in sorted(given.keys() | natural.keys()):
        have, want = (
            None if x is None else tuple(x.shape) for x in (given.get(path), natural.get(path))
        )
        if have is None or want is None or not _holds(have, want):
            raise ValueError(
                f"the parameters are of another model: {'/'.join(path)} has the shape {have}, and "
                f"the model's own is {want}; give those of the model without adapters, such as the "
                "params of its state"
            )


def _holds(have: Sequence[int], want: Sequence[int]) -> bool:
    return len(have) == len(want) and all(n >= m for n, m in zip(have, want))


def check_params(plan: LoraPlan, params: Any) -> None:
    """Check that parameters are a base and its adapters, in natural shapes.

    Raises:
      ValueError: they are not, or of another model.
    """
    if not isinstance(params, Mapping) or set(params) != {BASE, LORA}:
        raise ValueError(
            f"merge takes the parameters of a state with adapters, a dict of {BASE!r} and {LORA!r} "
            f"as zeroxla.full_params returns it; these are a {type(params).__name__}"
            + (f" of {sorted(params)}" if isinstance(params, Mapping) else "")
        )
    want = dict(paths_of(jax.eval_shape(lambda: _expected(plan))))
    have = dict(paths_of(params))
    for path in sorted(want.keys() | have.keys()):
        shapes = [None if x is None else tuple(x.shape) for x in (have.get(path), want.get(path))]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the parameters are of another model: {'/'.join(path)} has the shape {shapes[0]}, "
                f"and that of this model is {shapes[1]}; give natural shapes, as "
                "zeroxla.full_params does"
            )


def _expected(plan: LoraPlan) -> Tree:
    base = {
        path: plan.stored(path, jax.numpy.zeros(x.shape, x.dtype))
        for path, x in paths_of(plan.shapes)
    }
    tree = jax.tree.unflatten(jax.tree.structure(plan.shapes), list(base.values()))
    return {BASE: tree, LORA: plan.fresh_adapters(jax.random.key(0))}
