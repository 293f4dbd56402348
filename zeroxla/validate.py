"""Checks of what users pass in, before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.config import ZeroConfig
from zeroxla.layout import make_layout
from zeroxla.mesh import DEVICE, NODE, world_size
from zeroxla.placement import leaf_path
from zeroxla.state import TrainState


def check_batch(
    batch: Any, mesh: Mesh, config: ZeroConfig, *, accumulate: int | None = None
) -> Any:
    """Return `batch` as a pytree of arrays (or ShapeDtypeStructs).

    Raises:
      ValueError: it is empty, a leaf has no leading dim, the leading dims differ, or they do not
        divide over devices x accumulate.
    """
    accumulate = config.accumulate if accumulate is None else accumulate
    batch = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), batch)
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise ValueError(f"the batch {batch!r} holds no arrays; pass a pytree of arrays")
    sizes = {}
    for path, leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"the batch leaf {leaf_path(path)!r} is a scalar; every array of a batch has the "
                "global batch as its leading dim (close over constants instead)"
            )
        sizes[leaf_path(path)] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the arrays of the batch have different leading dims: {sizes}")
    size = next(iter(sizes.values()))
    parts = world_size(mesh) * accumulate
    if size == 0 or size % parts:
        accumulated = f" and accumulate={accumulate}" if accumulate > 1 else ""
        raise ValueError(
            f"batch of {size} does not divide over {world_size(mesh)} devices (axes "
            f"node={mesh.shape[NODE]}, device={mesh.shape[DEVICE]}){accumulated}; use a multiple of "
            f"{parts}, or pad"
        )
    return batch


def check_state(
    state: TrainState, optimizer: optax.GradientTransformation, config: ZeroConfig
) -> None:
    """Check that a state fits the optimizer.

    Raises:
      ValueError: it is no TrainState, or its optimizer state is of another optimizer or model.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"the state is a {type(state).__name__}, not a TrainState; make it with step.init"
        )
    placements = state.placements[0]
    layout = make_layout(state.params, placements, config)
    shapes = [jax.ShapeDtypeStruct(p.shape, "float32") for p in placements]
    params = layout.trainable(layout.tree.unflatten(shapes), optax.MaskedNode())
    expected = jax.eval_shape(optimizer.init, params)
    if jax.tree.structure(expected) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "the state's optimizer state does not fit this step's optimizer, model and frozen "
            f"leaves.\nexpected {jax.tree.structure(expected)}\nfound    "
            f"{jax.tree.structure(state.opt_state)}\nMake a state with this step's init, or use "
            "the optimizer and the config that made this one"
        )
    pairs = zip(
        jax.tree_util.tree_flatten_with_path(expected)[0], state.placements[1], strict=True
    )
    for (path, want), placement in pairs:
        if tuple(want.shape) != placement.shape:
            raise ValueError(
                f"the optimizer state {leaf_path(path)!r} has the shape {placement.shape} and this "
                f"model needs {tuple(want.shape)}; it belongs to another model"
            )
