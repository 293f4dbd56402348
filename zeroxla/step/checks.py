"""Checks of users' arguments, before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.mesh.axes import DEVICE, NODE, world_size
from zeroxla.offload.disk.disk_array import DiskShape
from zeroxla.program.paths import leaf_path
from zeroxla.step.state import TrainState
from zeroxla.wire.leaves import Layout


def check_batch(batch: Any, mesh: Mesh, accumulate: int, micro_batch: int | None = None) -> Any:
    """Return `batch` as a pytree of arrays (or ShapeDtypeStructs).

    Raises:
      ValueError: the batch is empty, a leaf has no leading dim, the leading dims differ or do not
        divide over devices x accumulate, or a micro-batch does not have `micro_batch` rows.
    """
    batch = jax.tree.map(_canonical, batch)
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    if not leaves:
        raise ValueError(f"the batch {batch!r} holds no arrays; pass a pytree of arrays")
    sizes = {}
    for path, leaf in leaves:
        if not _is_number(leaf.dtype):
            raise ValueError(
                f"the batch leaf {leaf_path(path)!r} has dtype {leaf.dtype}; a batch holds numbers "
                "and flags only (turn text into token numbers first)"
            )
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
            f"node={mesh.shape[NODE]}, device={mesh.shape[DEVICE]}){accumulated}; use a multiple "
            f"of {parts}, or pad"
        )
    if micro_batch is not None and size != parts * micro_batch:
        raise ValueError(
            f"batch of {size} gives each of {world_size(mesh)} devices x {accumulate} "
            f"micro-batches {size // parts} rows, and micro_batch={micro_batch}; use a batch of "
            f"{parts * micro_batch}, or set micro_batch=None"
        )
    return batch


def _canonical(x: Any) -> Any:
    """Return an array (or shape) in JAX's dtype for it: int32 for NumPy's int64."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if isinstance(x, jax.Array) or not _is_number(x.dtype):
        return x
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype)
    return np.asarray(x, dtype)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def check_is_state(state: Any) -> None:
    """Check that `state` is a TrainState that holds arrays.

    Raises:
      ValueError: it is something else, or an earlier step has taken its memory.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"the state is a {type(state).__name__}, not a TrainState; make it with step.init"
        )
    # Some releases of JAX crash on such arrays.
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise ValueError(
            "the state was deleted by the step that it was given to, which took its memory; go on "
            "with the state that the step returned"
        )


def check_state(state: TrainState, optimizer: optax.GradientTransformation, layout: Layout) -> None:
    """Check that a state fits the optimizer.

    Args:
      state: the state.
      optimizer: the optimizer that is to update it.
      layout: the layout of the state's leaves.

    Raises:
      ValueError: its optimizer state belongs to another optimizer or model.
    """
    shapes = [jax.ShapeDtypeStruct(p.shape, "float32") for p in layout.placements]
    params = layout.trainable(layout.tree.unflatten(shapes), optax.MaskedNode())
    expected = jax.eval_shape(optimizer.init, params)
    if jax.tree.structure(expected) != jax.tree.structure(state.opt_state):
        raise ValueError(
            "the state's optimizer state does not fit this step's optimizer, model and frozen "
            f"leaves.\nexpected {jax.tree.structure(expected)}\nfound    "
            f"{jax.tree.structure(state.opt_state)}\nMake a state with this step's init, or use "
            "the optimizer and the config that made this one"
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


def check_weights(weights: str) -> None:
    """Check the option that says how often a pipeline gathers its leaves.

    Raises:
      ValueError: there is no such choice.
    """
    if weights not in ("step", "tick"):
        raise ValueError(f'weights={weights!r}; use "step" or "tick"')


def check_stored(params: Any, expected: Any) -> Any:
    """Check that parameters have the stored form of the model's state; return them.

    Args:
      params: arrays. A leaf on disk may be a function that returns its array. It is not called
        here; the function that is returned for it checks the array.
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
        if isinstance(want, DiskShape) and callable(have):
            return lambda: _check_stored(leaf_path(path), have(), want)
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


def check_key(key: Any) -> jax.Array:
    """Return `key` as a typed PRNG key.

    Raises:
      ValueError: it is neither a typed nor a raw key.
    """
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if dtype is not None and dtype == np.uint32:
        return jax.random.wrap_key_data(key)
    raise ValueError(f"{key!r} is no PRNG key; pass jax.random.key(0)")


def _shapes_by_path(tree: Any, shapes: Any) -> dict[str, tuple[int, ...]]:
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return {path: tuple(shape) for path, shape in zip(paths, shapes, strict=True)}
