"""`first_weights`: the parameters and the model state of a first state, from weights that a user
has."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.frontend import Adapted
from zeroxla.frontend.given import arrays_by_path, flat_arrays
from zeroxla.frontend.lora.leaf_plan import BASE, LORA, LoraPlan
from zeroxla.mesh.placement import Placement
from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import given_for
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.adapters import fresh_adapters
from zeroxla.step.state import TrainState
from zeroxla.step.whole_arrays import StoredLeaf, as_array

Given = dict[Path, Any]


def first_weights(
    given: Any,
    model_state: Any,
    *,
    adapted: Adapted,
    shapes: TrainState,
    mesh: Mesh,
    key: jax.Array,
    donate: bool,
) -> tuple[Any, Any]:
    """Return the parameters and the model state of a first state, as it stores them.

    A parameter that goes to disk is a function, which is called once the parameter before is being
    written. A model state of None was not given.

    Args:
      given, model_state, donate: as for `zeroxla.init_from`.
      adapted: the model.
      shapes: the shapes of the state, with shardings.
      mesh: the mesh.
      key: the PRNG key of new adapters.

    Raises:
      ValueError: in every process, if the weights of one do not fit the model.
    """
    if isinstance(given, TrainState):
        raise ValueError(
            "params= is a TrainState; give its parts: init_from(step, state.params, key, "
            "model_state=state.model_state)"
        )
    plan: LoraPlan | None = None if adapted.plan is None else adapted.plan()
    leaves, state_leaves = _param_leaves(shapes, plan), _state_leaves(shapes, mesh)
    is_base = plan is not None and not _has_adapters(given)
    if is_base:  # the weights of the base, under its own names
        leaves = {path[1:]: leaf for path, leaf in leaves.items() if path[0] == BASE}

    def read() -> tuple[Given, Given | None]:
        names = {path: leaf.shape for path, leaf in leaves.items()}
        params, state = arrays_by_path(given, names, state_leaves.keys(), adapted.sown)
        if model_state is not None:
            if state:
                raise ValueError(
                    "model_state= is given, and the weights hold a model state too; leave out one"
                )
            state = flat_arrays(model_state)
        is_given = bool(state) or model_state is not None
        rows = [*_misfits(leaves, params), *(_misfits(state_leaves, state) if is_given else [])]
        if rows:
            raise ValueError(
                "the weights are not of this model:\n  " + "\n  ".join(rows) + "\ngive whole "
                "arrays under the model's own names, in the shapes that step.describe() lists"
            )
        return params, state if is_given else None

    params, state = together("given weights", read)
    made: dict[Path, Any] = {}
    for path, shape in paths_of(shapes.params):
        name = path[1:] if is_base else path
        if name in leaves:
            store = functools.partial(leaves[name].store, params[name], donate=donate)
            made[path] = given_for(shape, store)
    if plan is not None and is_base:

        def base_leaf(path: Path) -> jax.Array:
            stored = made[BASE, *path]
            # A leaf that goes to disk is not read yet, and will be read again.
            return leaves[path].store(params[path], donate=False) if callable(stored) else stored

        made |= fresh_adapters(plan, mesh, key, shapes, base_leaf)
    if state is not None:
        stored = [leaf.store(state[path], donate=False) for path, leaf in state_leaves.items()]
        state = jax.tree.unflatten(jax.tree.structure(shapes.model_state), stored)
    ordered = [made[path] for path, _ in paths_of(shapes.params)]
    return jax.tree.unflatten(jax.tree.structure(shapes.params), ordered), state


def _param_leaves(shapes: TrainState, plan: LoraPlan | None) -> dict[Path, StoredLeaf]:
    """Return the parameters by path; those of a base that are stored as wires are given as
    floats."""
    found = {}
    naturals = {} if plan is None else dict(paths_of({BASE: plan.shapes}))
    for (path, x), placement in zip(paths_of(shapes.params), shapes.placements[0], strict=True):
        wire = None
        if plan is not None and path in naturals and x.dtype == np.uint8:
            format = plan.format(path[1:])
            wire = None if format is None else (plan.dense[path[1:]], format)
        found[path] = StoredLeaf(
            name="/".join(path),
            shape=placement.shape if wire is None else tuple(naturals[path].shape),
            dtype=np.dtype(x.dtype),
            placement=placement,
            sharding=x.sharding,
            wire=wire,
        )
    return found


def _state_leaves(shapes: TrainState, mesh: Mesh) -> dict[Path, StoredLeaf]:
    """Return the leaves of the model state by path."""
    return {
        path: StoredLeaf(
            name="/".join(path),
            shape=tuple(x.shape),
            dtype=x.dtype,
            placement=Placement(shape=tuple(x.shape)),
            sharding=NamedSharding(mesh, PartitionSpec()),
        )
        for path, x in paths_of(shapes.model_state)
    }


def _has_adapters(given: Any) -> bool:
    """Return whether weights are those of a base and its adapters."""
    return isinstance(given, Mapping) and given.keys() == {BASE, LORA}


def _misfits(leaves: Mapping[Path, StoredLeaf], given: Mapping[Path, Any]) -> list[str]:
    """Say what is missing, unexpected or of another shape or dtype, a line for each leaf."""
    rows = []
    for path, leaf in leaves.items():
        name = "/".join(path)
        if path not in given:
            rows.append(f"{name} ({leaf.words}) is missing")
        elif (words := leaf.misfit(given[path])) is not None:
            rows.append(f"{name} {words}")
    for path, x in given.items():
        if path not in leaves:
            x = None if callable(x) else as_array(x)
            what = "a function" if x is None else f"{x.dtype}{list(x.shape)}"
            rows.append(f"{'/'.join(path)} ({what}) is not in the model")
    return rows
