"""Checks that a state, or what it is made from, fits a model and its options."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.leaf_plan import LORA
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape, in_memory
from zeroxla.program.paths import leaf_path
from zeroxla.program.tree_difference import first_difference
from zeroxla.step.state import TrainState
from zeroxla.wire.leaves import Layout


def trainable_shapes(layout: Layout) -> Any:
    """Return the shapes of the parameters that an optimizer sees."""
    shapes = [jax.ShapeDtypeStruct(p.shape, "float32") for p in layout.placements]
    return layout.trainable(layout.tree.unflatten(shapes), optax.MaskedNode())


def check_state(state: TrainState, optimizer: optax.GradientTransformation, layout: Layout) -> None:
    """Check that a state fits the optimizer.

    Args:
      state: the state.
      optimizer: the optimizer that is to update it.
      layout: the layout of the state's leaves.

    Raises:
      ValueError: its optimizer state belongs to another optimizer or model.
    """
    expected = jax.eval_shape(optimizer.init, trainable_shapes(layout))
    if (words := first_difference(expected, state.opt_state)) is not None:
        raise ValueError(
            "the state's optimizer state does not fit this step's optimizer, model and frozen "
            f"leaves: {words}; make a state with this step's init, or use the optimizer and the "
            "config that made this one"
        )
    rows = zip(
        jax.tree_util.tree_flatten_with_path(expected)[0],
        state.placements[1],
        jax.tree.leaves(state.opt_state),
        strict=True,
    )
    for (path, want), placement, found in rows:
        if tuple(want.shape) != placement.shape or tuple(found.shape) != placement.stored_shape:
            raise ValueError(
                f"the optimizer state {leaf_path(path)!r} has the shape {tuple(found.shape)} and "
                f"this model needs {tuple(want.shape)}; it belongs to another model"
            )


def check_model(state: TrainState, expected: Any) -> None:
    """Check that a state holds this model's parameters.

    Args:
      expected: shapes of the model's parameters.

    Raises:
      ValueError: a leaf is missing, unknown, or has another shape.
    """
    want = _shapes_by_path(expected, [x.shape for x in jax.tree.leaves(expected)])
    have = _shapes_by_path(state.params, [p.shape for p in state.placements[0]])
    if want != have:
        differing = sorted(p for p in want.keys() | have.keys() if want.get(p) != have.get(p))
        first = differing[0]
        raise ValueError(
            f"the state is of another model: {len(differing)} leaves differ, first {first!r}, "
            f"which has the shape {have.get(first)} and should have {want.get(first)}; make a "
            "state with this step's init"
        )


def check_trainable(params: Any, config: ZeroConfig) -> None:
    """Check that the frozen patterns leave something to train.

    Args:
      params: the shapes of the model's parameters.
      config: the options, with the model's own frozen leaves.

    Raises:
      ValueError: every leaf is frozen, or both factors of an adapter are.
    """
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    frozen = {path for path in paths if config.is_frozen(path)}
    for path in sorted(frozen):
        adapter, _, factor = path.rpartition("/")
        if path.startswith(f"{LORA}/") and factor == "a" and f"{adapter}/b" in frozen:
            raise ValueError(
                f"frozen={list(config.frozen)} matches both factors of the adapter {adapter!r}, "
                "which could not train. The base is frozen anyway: leave the pattern out, or begin "
                "it with ^base/"
            )
    if len(frozen) == len(paths):
        raise ValueError(
            f"frozen={list(config.frozen)} matches all {len(paths)} leaves of the model, so "
            "nothing would train; narrow the patterns"
        )


def check_stored(params: Any, expected: Any) -> Any:
    """Check that parameters have the stored form of the model's state; return them.

    Args:
      params: arrays, or functions that return them. The function of a leaf on disk is not called
        here; the one that is returned for it checks the array.
      expected: the shapes of the stored leaves, with shardings.

    Raises:
      ValueError: the tree, a shape, a dtype or a sharding differs.
    """
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise ValueError(
            f"the parameters have the structure {jax.tree.structure(params)}, and the model's "
            f"{jax.tree.structure(expected)}"
        )

    def checked(path: Any, have: Any, want: jax.ShapeDtypeStruct) -> Any:
        if isinstance(have, DiskArray):
            have = functools.partial(in_memory, have)
        if callable(have):
            name = leaf_path(path)
            if isinstance(want, DiskShape):
                return lambda: _check_stored(name, have(), want)
            have = have()
        return _check_stored(leaf_path(path), have, want)

    return jax.tree_util.tree_map_with_path(checked, params, expected)


def _check_stored(name: str, have: Any, want: jax.ShapeDtypeStruct) -> jax.Array:
    if not isinstance(have, jax.Array) or have.dtype != want.dtype or have.shape != want.shape:
        raise ValueError(
            f"the parameter {name!r} is a {type(have).__name__} of "
            f"{getattr(have, 'dtype', None)}{list(np.shape(have))}; a state has a jax.Array of "
            f"{want.dtype}{list(want.shape)} there, padding included"
        )
    assert want.sharding is not None
    if not have.sharding.is_equivalent_to(want.sharding, have.ndim):
        raise ValueError(
            f"the parameter {name!r} has the sharding {have.sharding}, and this step stores it "
            f"with {want.sharding}; use jax.device_put"
        )
    return have


def check_model_state(model_state: Any, expected: Any) -> None:
    """Check that a model state is one of this model.

    Args:
      model_state: arrays.
      expected: the shapes of the model's own.

    Raises:
      ValueError: a leaf is missing, unknown, or has another shape or dtype.
    """
    have, want = _types_by_path(model_state), _types_by_path(expected)
    for path in sorted(have.keys() | want.keys()):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"the model state is of another model: {path!r} is {have.get(path)}, and should be "
                f"{want.get(path)}; pass the model_state of a state of this model"
            )


def _types_by_path(tree: Any) -> dict[str, str]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {leaf_path(path): f"{jnp.dtype(x.dtype)}{list(np.shape(x))}" for path, x in found}


def _shapes_by_path(tree: Any, shapes: Any) -> dict[str, tuple[int, ...]]:
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: tuple(shape) for path, shape in zip(paths, shapes, strict=True)}
