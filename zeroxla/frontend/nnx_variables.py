"""The variables of a flax.nnx module, taken out of it and put back, by path as text.

Modules may share variables, whether or not flax is told to take modules for trees
(`NNX_GRAPH_MODE=false`). So every call of flax here says that a module is a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from zeroxla.frontend.base import OVERWRITE_WITH_GRADIENT, stream_key
from zeroxla.program.paths import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StaticModule:
    """The static part of a module, from which it is put together again with arrays."""

    graphdef: Any
    paths: dict[Path, tuple[Any, ...]]
    """The module's own path (integers for list items) of each leaf."""
    streams: dict[Path, jax.ShapeDtypeStruct]
    """The key and the count of each rng stream; stacked layers have stacked streams."""


def variables_of(module: nnx.Module, *kinds: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the variables and arrays of a module, or those of some kinds, with their paths."""
    state: Any = nnx.state(module, *kinds, graph=True)
    return list(nnx.to_flat_state(state))


def take_apart(
    module: nnx.Module, known: Collection[Path] | None = None
) -> tuple[Any, dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
    """Return (graph definition, parameters, rng streams, all other arrays), by path as text.

    An `nnx.Param` of whole numbers or flags has no gradient, and is one of the other arrays. With
    `known` given, variables at other paths are left out.
    """

    def flat(state: Any) -> dict[Path, Any]:
        return {
            text(path): raw(path, leaf)
            for path, leaf in nnx.to_flat_state(state)
            if known is None or text(path) in known
        }

    graphdef, params, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ..., graph=True)
    leaves = flat(params)
    params = {path: x for path, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    rest = {path: x for path, x in leaves.items() if path not in params}
    return graphdef, params, flat(streams), {**flat(others), **rest}


def put_together(layout: StaticModule, leaves: Mapping[Path, Any], key: jax.Array) -> nnx.Module:
    """Return the module with these arrays, and with rng streams made from the key."""
    streams = {path: fresh(path, shape, key) for path, shape in layout.streams.items()}
    state = nnx.from_flat_state(
        [(layout.paths[path], leaf) for path, leaf in {**leaves, **streams}.items()]
    )
    # copy=True makes variables of the present trace. Otherwise their updates raise an error.
    return nnx.merge(layout.graphdef, state, copy=True)


def fresh(path: Path, shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Return the stream's own key (split to its shape if stacked), or a zero count."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    own = stream_key(key, "/".join(path[:-1]))
    return jax.random.split(own, shape.shape) if shape.shape else own


def real_paths(module: nnx.Module) -> dict[Path, tuple[Any, ...]]:
    """Return the module's own path of each path as text.

    Raises:
      ValueError: two paths read the same, as the keys 0 and "0" of one dict do.
    """
    paths: dict[Path, tuple[Any, ...]] = {}
    for path, _ in variables_of(module):
        if text(path) in paths:
            raise ValueError(
                f"two variables have the same path as text: {'/'.join(text(path))}; "
                "rename a dict key"
            )
        paths[text(path)] = path
    return paths


def indices_of(paths: Iterable[tuple[Any, ...]]) -> tuple[Path, ...]:
    """Return the beginnings of a module's own paths that end in a whole number or a tuple, as
    text."""
    beginnings = (path[: i + 1] for path in paths for i in range(len(path)))
    return tuple(sorted({text(path) for path in beginnings if isinstance(path[-1], int | tuple)}))


def whole_numbers(module: nnx.Module) -> list[str]:
    """Return name and dtype of each `nnx.Param` that can have no gradient."""
    leaves = {text(p): raw(p, x) for p, x in variables_of(module, nnx.Param)}
    return [
        f"{'/'.join(path)} ({x.dtype})"
        for path, x in leaves.items()
        if not jnp.issubdtype(x.dtype, jnp.inexact)
    ]


def overwritten_paths(module: nnx.Module) -> frozenset[Path]:
    """Return the paths of the variables whose gradient is their new value. A linen layer with fp8
    dots has them, inside of `nnx.bridge.ToNNX`."""
    kind = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
    return frozenset(text(path) for path, _ in variables_of(module, kind))


def set_mode(module: nnx.Module, *, train: bool) -> None:
    """Tell the module and its parts whether they train."""
    with nnx.set_graph_mode(True):
        module.train() if train else module.eval()


def own_arrays(module: nnx.Module) -> None:
    """Mark arrays that are plain attributes of the module or its parts as data.

    Flax does so when they are concrete; while tracing it takes them for static values, and the
    tracers leak into the graph definition.
    """
    for _, part in list(nnx.iter_modules(module, graph=True)):
        for name, value in list(vars(part).items()):
            traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
            if traced and not isinstance(value, nnx.Variable | nnx.Pytree):
                setattr(part, name, nnx.data(value))


def arrays_of(given: nnx.Module | nnx.State) -> dict[Path, Any]:
    """Return the arrays of a module or a state by path as text, without its rng streams."""
    leaves = variables_of(given) if isinstance(given, nnx.Module) else nnx.to_flat_state(given)
    return {
        text(path): x.get_raw_value() if isinstance(x, nnx.Variable) else x
        for path, x in leaves
        if not isinstance(x, nnx.RngState)
    }


def text(path: tuple[Any, ...]) -> Path:
    return tuple(map(str, path))


def raw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if not hasattr(value, "dtype"):
        raise ValueError(
            f"variable {'/'.join(text(path))} holds a {type(value).__name__}; a variable must hold "
            "one array"
        )
    return jnp.asarray(value)
