"""Checks of users' arguments, before anything is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import BATCH_AXES, DEVICE, NODE, PIPE, world_size
from zeroxla.mesh.batches import in_dtype_of_jax, plain_batch
from zeroxla.program.compat import AxisNames
from zeroxla.program.paths import leaf_path


def check_no_island(config: ZeroConfig) -> None:
    """Check that a step may train by itself.

    Raises:
      ValueError: its config says how islands exchange. Alone it would exchange nothing, and several
        hosts would train a model each.
    """
    if config.outer is not None:
        raise ValueError(
            f"the config has outer={config.outer}, so the step trains as an island, and called by "
            "itself it would exchange nothing; make island = zeroxla.Island(step), and call "
            "island(state, batch) with the state of island.init; or leave outer out: "
            "step.with_config(dataclasses.replace(step.config, outer=None))"
        )


def check_batch(batch: Any, mesh: Mesh, accumulate: int, micro_batch: int | None = None) -> Any:
    """Return `batch` as a pytree of arrays (or ShapeDtypeStructs).

    Raises:
      ValueError: the batch is empty, a leaf has no leading dim, the leading dims differ or do not
        divide over devices x accumulate, a micro-batch does not have `micro_batch` rows, or a whole
        number does not fit into JAX's dtype.
    """
    batch = jax.tree_util.tree_map_with_path(_canonical, plain_batch(batch))
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


@contextlib.contextmanager
def keys_named(batch: Any) -> Iterator[None]:
    """Return a context for tracing a model on a batch. In it a key that the batch lacks is named.

    Raises:
      ValueError: the model reads such a key.
    """
    try:
        yield
    except KeyError as error:
        key = error.args[0] if len(error.args) == 1 else None
        if not isinstance(batch, Mapping) or not isinstance(key, str) or key in batch:
            raise
        raise ValueError(
            f"the model or its loss reads {key!r}, which the batch does not have: its keys are "
            f"{', '.join(map(repr, batch))}; add it to the batch, or rename one"
        ) from error


def check_tokens(batch: Any, vocabulary: int | None) -> None:
    """Check that the tokens of a batch are in the model's vocabulary. Only arrays of the host are
    looked at.

    Args:
      batch: a batch; its tokens are `batch["tokens"]`.
      vocabulary: the number of different tokens; None if it is not known.

    Raises:
      ValueError: a token is negative or too large.
    """
    tokens = batch.get("tokens") if isinstance(batch, dict) else None
    if vocabulary is None or not isinstance(tokens, np.ndarray) or not tokens.size:
        return
    least, most = tokens.min(), tokens.max()
    if np.issubdtype(tokens.dtype, np.integer) and not 0 <= least <= most < vocabulary:
        raise ValueError(
            f"the batch leaf 'tokens' holds tokens from {least} to {most}, and the model's "
            f"vocabulary is 0 to {vocabulary - 1}; correct the tokenizer or the model, "
            "and mark padding in batch['mask']"
        )


def _canonical(path: Any, x: Any) -> Any:
    """Return an array (or shape) in JAX's dtype for it: int32 for NumPy's int64."""
    is_shape = hasattr(x, "dtype") and not hasattr(x, "__array__")
    x = x if is_shape or isinstance(x, jax.Array) else np.asarray(x)  # of PyTorch, too
    if isinstance(x, jax.Array) or not _is_number(x.dtype):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    return in_dtype_of_jax(np.asarray(x), leaf_path(path))


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def check_is_config(config: Any) -> None:
    """Check that an argument is a `ZeroConfig`.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(config, ZeroConfig):
        hint = (
            "; pass ZeroConfig(**options), or for a configuration of DeepSpeed's "
            "ZeroConfig.from_deepspeed(configuration)"
            if isinstance(config, dict | str)
            else "; pass zeroxla.ZeroConfig(...)"
        )
        raise ValueError(f"config is {_shown(config)}, not a ZeroConfig{hint}")


def check_is_optimizer(optimizer: Any) -> None:
    """Check that an argument is an optax transformation.

    Raises:
      ValueError: it is something else, such as the function that makes one.
    """
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return
    name = getattr(optimizer, "__name__", "optax.adamw")
    raise ValueError(
        f"optimizer is {_shown(optimizer)}, not an optax transformation; "
        + (f"call it: {name}(...)" if callable(optimizer) else "pass such as optax.adamw(3e-4)")
    )


def _shown(value: Any) -> str:
    """Return a value and its type in words, on one short line."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} (a {type(value).__name__})"


def check_weights(weights: str) -> None:
    """Check the option that says how often a pipeline gathers its leaves.

    Raises:
      ValueError: there is no such choice.
    """
    if weights not in ("step", "tick"):
        raise ValueError(f'weights={weights!r}; use "step" or "tick"')


def checked_axis_names(axis_names: Any, *, num_stages: int) -> AxisNames:
    """Return the argument `axis_names` of `make_step` as pairs (name, axes).

    Raises:
      ValueError: it is no dict, gives a mesh's axis another meaning, or names no axis of a batch;
        or there are stages.
    """
    if axis_names is None:
        return ()
    if num_stages > 1:
        raise ValueError(
            f"axis_names={axis_names!r} on a mesh with pipe={num_stages}: a pipeline cuts the "
            "trace of the model on one device, where the mesh's axes are not known; leave "
            "collectives out of the model, or use pipe=1"
        )
    example = '{"batch": ("node", "device")}'
    if not isinstance(axis_names, Mapping):
        raise ValueError(f"axis_names is {_shown(axis_names)}, not a dict; pass such as {example}")
    pairs = []
    for name, axes in axis_names.items():
        axes = (axes,) if isinstance(axes, str) else axes
        right = isinstance(axes, tuple | list) and axes and set(axes) <= set(BATCH_AXES)
        if not isinstance(name, str) or name in (*BATCH_AXES, PIPE) or not right:
            raise ValueError(
                f"axis_names={dict(axis_names)!r}: {name!r} stands for {axes!r}; a new name stands "
                f"for one or more of the axes {BATCH_AXES}, over which batches are split; pass "
                f"such as {example}"
            )
        pairs.append((name, tuple(axes)))
    return tuple(pairs)


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
