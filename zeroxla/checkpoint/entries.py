"""The form of a training state in a checkpoint: arrays by name, in natural shapes, without a mesh.

A name is a path of keys, such as ("params", "h", "attn", "c_attn", "kernel") or ("opt_state", "0",
"mu", ...). The wire state comes under "wires". It may be missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.mesh.placement import Placement
from zeroxla.program.paths import Path, paths_of
from zeroxla.step.islands.saved_island import SavedIsland
from zeroxla.step.state import TrainState
from zeroxla.wire.wire_state import PARTS, WireState

WIRES = "wires"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An array of a state.

    Attributes:
      array: the array as the state stores it, padding included, or its `jax.ShapeDtypeStruct`. A
        PRNG key is its key data.
      shape: the natural shape.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return np.dtype(self.array.dtype).name

    @property
    def is_padded(self) -> bool:
        return self.shape != self.array.shape


def entries(state: TrainState) -> dict[Path, Entry]:
    """Return the arrays of a state, or of its shapes, by name.

    Raises:
      ValueError: two arrays have the same name, as in {"a": {"b": x}, "a.b": y}.
    """
    found: dict[Path, Entry] = {}
    for name, tree, placements in (
        ("params", state.params, state.placements[0]),
        ("opt_state", state.opt_state, state.placements[1]),
    ):
        paths = [(name, *path) for path, _ in paths_of(tree)]
        found |= _placed(paths, jax.tree.leaves(tree), placements)
    rest = {
        "model_state": state.model_state,
        "key": _key_data(state.key),
        "loss_scale": state.loss_scale,
        "step": state.step,
    }
    found |= {path: Entry(array=x, shape=x.shape) for path, x in paths_of(rest)}
    if state.wire_state is not None:
        paths = [path for path, _ in paths_of(state.params)]
        names, shapes = state.wire_state.names(paths), state.wire_state.shapes(state.placements[0])
        for part in PARTS:
            trio = zip(*(getattr(x, part) for x in (names, state.wire_state, shapes)), strict=True)
            found |= {
                (WIRES, *path): Entry(array=x, shape=shape)
                for path, x, shape in trio
                if x is not None
            }
    _check_names(found)
    return found


def outer_entries(state: SavedIsland) -> dict[Path, Entry]:
    """Return the outer arrays of an island, or of its shapes, by name."""
    arrays = state.arrays or {}
    return {path: Entry(array=x, shape=state.shapes[path]) for path, x in arrays.items()}


def rebuild(like: TrainState, arrays: Mapping[Path, Any], *, key: str) -> TrainState:
    """Build a state from arrays by name, stored as in `like`.

    Args:
      like: a state, or its shapes.
      arrays: the arrays of all `entries(like)`; the wire state may be missing. If a part of it is
        missing, the new state has no wire state, and the step makes it anew.
      key: the kind of the PRNG key.
    """

    def tree(name: str) -> Any:
        old = getattr(like, name)
        new = [arrays[name, *path] for path, _ in paths_of(old)]
        return jax.tree.unflatten(jax.tree.structure(old), new)

    return TrainState(
        step=arrays["step",],
        params=tree("params"),
        opt_state=tree("opt_state"),
        model_state=tree("model_state"),
        key=_wrap_key(arrays["key",], key),
        loss_scale=tree("loss_scale"),
        wire_state=_wire_state(like, arrays),
        placements=like.placements,
        indices=like.indices,
        containers=like.containers,
    )


def with_params(state: TrainState, arrays: Mapping[Path, Any]) -> Any:
    """Return the parameters of a state, some of them replaced."""
    leaves = [arrays.get(("params", *path), x) for path, x in paths_of(state.params)]
    return jax.tree.unflatten(jax.tree.structure(state.params), leaves)


def key_kind(key: jax.Array) -> str:
    """Return the name of a PRNG key's kind, such as "fry" for threefry."""
    return str(jax.random.key_impl(key))


def slashed(path: Path) -> str:
    """Return an array's name for people, such as "params/h/attn/c_attn/kernel"."""
    return "/".join(path)


def _wire_state(like: TrainState, arrays: Mapping[Path, Any]) -> WireState | None:
    if like.wire_state is None:
        return None
    paths = [path for path, _ in paths_of(like.params)]
    names = like.wire_state.names(paths)
    parts = {}
    for part in PARTS:
        wanted = [None if name is None else (WIRES, *name) for name in getattr(names, part)]
        if any(name is not None and name not in arrays for name in wanted):
            return None
        parts[part] = [None if name is None else arrays[name] for name in wanted]
    return dataclasses.replace(like.wire_state, **parts)


def _placed(
    paths: Sequence[Path], leaves: Sequence[Any], placements: Sequence[Placement]
) -> dict[Path, Entry]:
    trio = zip(paths, leaves, placements, strict=True)
    return {path: Entry(array=x, shape=p.shape) for path, x, p in trio if x is not None}


def _check_names(found: Mapping[Path, Entry]) -> None:
    seen: dict[str, Path] = {}
    for path in found:
        other = seen.setdefault(".".join(path), path)
        if other != path:
            raise ValueError(
                f"{slashed(other)} and {slashed(path)} have the same name in a checkpoint, "
                f"{'.'.join(path)}; rename one of them"
            )


def _key_data(key: Any) -> Any:
    if isinstance(key, jax.Array):
        return jax.random.key_data(key)
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)


def _wrap_key(data: jax.Array, kind: str) -> jax.Array:
    assert isinstance(data.sharding, NamedSharding)
    everywhere = NamedSharding(data.sharding.mesh, PartitionSpec())  # a key has no dims
    wrap = jax.jit(lambda x: jax.random.wrap_key_data(x, impl=kind), out_shardings=everywhere)
    return wrap(data)


def empty(entry: Entry) -> jax.Array:
    """Return an array without elements, which the storage does not hold."""
    zeros = np.zeros(entry.array.shape, entry.array.dtype)
    return jax.make_array_from_callback(zeros.shape, entry.array.sharding, lambda i: zeros[i])
