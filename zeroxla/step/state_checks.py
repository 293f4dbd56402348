"""Checks that a state, or what it is made from, fits a model and its options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import optax

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.lora.leaf_plan import LORA
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


def check_state_of_stages(model_state: Any, overwritten: Collection[int]) -> None:
    """Check that the stages of a pipeline can keep the state of a model.

    Args:
      model_state: the state, or its shapes.
      overwritten: the numbers of the leaves whose gradient is their new value.

    Raises:
      NotImplementedError: there are such leaves.
    """
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(model_state)]
    if overwritten:
        raise NotImplementedError(
            f"the backward of every micro-batch overwrites {paths[min(overwritten)]!r} of the "
            "model's state, and in a pipeline the forwards of later micro-batches run before it; "
            "use pipe=1, or layers whose scales are computed in forward"
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
        still = {f"{adapter}/b", f"{adapter}/m"}.intersection(paths) <= frozen
        if path.startswith(f"{LORA}/") and factor == "a" and still:
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


def _shapes_by_path(tree: Any, shapes: Any) -> dict[str, tuple[int, ...]]:
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: tuple(shape) for path, shape in zip(paths, shapes, strict=True)}
