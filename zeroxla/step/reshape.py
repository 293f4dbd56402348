"""Moves a live state to the mesh of another step of the same model, without a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.mesh.placement import Placement
from zeroxla.program.paths import paths_of
from zeroxla.program.tree_difference import first_difference
from zeroxla.step.state import TrainState
from zeroxla.step.whole_arrays import StoredLeaf


def reshaped(state: TrainState, shapes: TrainState, mesh: Mesh) -> TrainState:
    """Return a state as another step stores it. The given one is donated.

    Args:
      state: a state of arrays.
      shapes: the shapes of the other step's states.
      mesh: the other step's mesh.

    Returns:
      The state, without what wires remember, and with arrays that belong on disk on the devices:
      the other step makes or moves these when it first takes the state.

    Raises:
      ValueError: the other step is of another model or has another optimizer.

    Cost: one leaf at a time beside the state.
    """
    placements = tuple(
        tuple(dataclasses.replace(p, memory=None) if p.is_on_disk else p for p in placed)
        for placed in shapes.placements
    )
    parts = []
    for part, old, new, placed in zip(
        ("parameters", "optimizer's state"),
        (state.params, state.opt_state),
        (shapes.params, shapes.opt_state),
        placements,
        strict=True,
    ):
        _check(part, old, new, state.placements[len(parts)], placed)
        parts.append(_stored(old, placed, mesh))
    rest = (state.step, state.model_state, state.key, state.loss_scale)
    everywhere = NamedSharding(mesh, PartitionSpec())
    step, model_state, key, loss_scale = jax.device_put(rest, everywhere)
    params, opt_state = parts
    return dataclasses.replace(
        state,
        step=step,
        params=params,
        opt_state=opt_state,
        model_state=model_state,
        key=key,
        loss_scale=loss_scale,
        wire_state=None,
        placements=placements,
    )


def _check(
    part: str, old: Any, new: Any, before: Sequence[Placement], after: Sequence[Placement]
) -> None:
    """Check that two trees have the same leaves."""
    words = first_difference(new, old)
    if words is None:
        for (path, x), placed, other in zip(paths_of(old), before, after, strict=True):
            if placed.shape != other.shape:
                shapes = f"{list(placed.shape)} there and {list(other.shape)} here"
                words = f"{'/'.join(path)} is {x.dtype}{shapes}"
    if words is not None:
        raise ValueError(
            f"the {part} of the state and of the other step differ: {words}; reshape goes from one "
            "mesh to another, with the same model, optimizer and frozen leaves"
        )


def _stored(tree: Any, placements: Sequence[Placement], mesh: Mesh) -> Any:
    """Return the arrays of a tree as other placements say, one after another."""
    found = []
    for (path, x), placement in zip(paths_of(tree), placements, strict=True):
        leaf = StoredLeaf(
            name="/".join(path),
            shape=placement.shape,
            dtype=np.dtype(x.dtype),
            placement=placement,
            sharding=placement.sharding(mesh),
        )
        found.append(leaf.store(x, donate=True))
    return jax.tree.unflatten(jax.tree.structure(tree), found)
