"""`SavedIsland`: an island's state in a form that belongs to no mesh and no number of fragments.

The outer parameters, and each array of the outer optimizer, become leaves like the parameters'. So
a checkpoint opens on other meshes and with other fragments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.program.paths import Path, paths_of
from zeroxla.step.islands.outer_programs import Leaves, OuterPrograms
from zeroxla.step.islands.outer_state import IslandState
from zeroxla.step.state import TrainState

OUTER = "outer"
"""The first key of the names of outer arrays."""
COPY = (OUTER, "copy")
"""The first keys of the names of the outer parameters, which all islands share."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedIsland:
    """A state as a checkpoint has it.

    Attributes:
      inner: the training state.
      arrays: the outer arrays by name, each stored like the parameter of the rest of its name: the
        outer parameters, and those of the outer optimizer unless another island saves them. None
        in what a checkpoint without the optimizer's gives back.
      shapes: their natural shapes.
      facts: `clock`, `round`, `versions`; with the outer optimizer also `numbers`, its own by
        fragment.
    """

    inner: TrainState
    arrays: Mapping[Path, Any] | None = None
    shapes: Mapping[Path, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] | None = None


def saved(state: IslandState, programs: Sequence[OuterPrograms], *, optimizer: bool) -> SavedIsland:
    """Return a state in the form of a checkpoint. What wires have lost is not kept.

    Args:
      state: the state.
      programs: the programs of its fragments.
      optimizer: whether to keep the outer optimizer's state, so that a run can go on from it.
    """
    vectors = [[f.copy for f in state.outer]]
    facts: dict[str, Any] = {
        "clock": state.clock,
        "round": state.round,
        "versions": list(state.versions),
    }
    if optimizer:
        columns = list(zip(*(jax.tree.leaves(f.opt_state) for f in state.outer), strict=True))
        vectors += [list(c) for c in columns if c[0].ndim]
        facts["numbers"] = [[np.asarray(x).item() for x in c] for c in columns if not c[0].ndim]
    arrays, shapes = _form(state.inner, programs, len(vectors))
    spread = _spread(programs, state.inner)
    for kind, vector in enumerate(vectors):
        for leaf, x in spread(vector).items():
            arrays[_name(kind, _paths(state.inner)[leaf])] = x
    return SavedIsland(inner=state.inner, arrays=arrays, shapes=shapes, facts=facts)


def form_of(shapes: TrainState, programs: Sequence[OuterPrograms]) -> SavedIsland:
    """Return the shapes of what `saved` returns, with shardings."""
    opt_state = jax.tree.leaves(programs[0].state_specs.opt_state, is_leaf=_is_spec)
    num = 1 + sum(spec != PartitionSpec() for spec in opt_state)
    arrays, natural = _form(shapes, programs, num)
    return SavedIsland(inner=shapes, arrays=arrays, shapes=natural)


def opened(state: SavedIsland, programs: Sequence[OuterPrograms]) -> IslandState:
    """Return an island's state from the form of a checkpoint that has outer arrays."""
    arrays, facts = state.arrays, state.facts
    assert arrays is not None
    assert facts is not None
    num, paths = len(programs), _paths(state.inner)
    of_programs = [jax.tree.leaves(p.state_specs.opt_state, is_leaf=_is_spec) for p in programs]
    take = _take(programs)
    rows = [
        take({i: arrays[_name(kind, paths[i])] for i in _leaves(programs)})
        for kind in range(1 + sum(spec != PartitionSpec() for spec in of_programs[0]))
    ]
    same = len(facts["versions"]) == num
    outer = []
    for p, program in enumerate(programs):
        found, numbers = [], iter(facts["numbers"])
        vectors = iter(rows[1:])
        specs = program.state_specs.opt_state
        shape = jax.ShapeDtypeStruct((1, program.fragment.size), jnp.float32)
        like = jax.tree.leaves(jax.eval_shape(program.outer.optimizer.init, shape))
        for x in like:
            if x.ndim:
                found.append(next(vectors)[p])
            else:
                each = next(numbers)
                value = np.asarray(each[p] if same else max(each), x.dtype)
                found.append(jax.device_put(value, NamedSharding(program.mesh, PartitionSpec())))
        opt_state = jax.tree.structure(specs, is_leaf=_is_spec).unflatten(found)
        outer.append(program.restored(rows[0][p], opt_state))
    round = facts["round"]
    versions = facts["versions"] if same else [round] * num
    clock = facts["clock"] if same else programs[0].outer.start_of(round - 1) if round else 0
    return IslandState(
        inner=state.inner,
        outer=tuple(outer),
        clock=clock,
        round=round,
        versions=tuple(versions),
    )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _paths(state: TrainState) -> list[Path]:
    return [path for path, _ in paths_of(state.params)]


def _name(kind: int, path: Path) -> Path:
    """Return the name of an outer array: of the copy, or of an array of the optimizer."""
    return (*COPY, *path) if kind == 0 else (OUTER, f"optimizer {kind}", *path)


def _leaves(programs: Sequence[OuterPrograms]) -> list[int]:
    """Return the numbers of the leaves that are exchanged."""
    return sorted({leaf for p in programs for leaf in p.fragment.leaves})


def _shardings(programs: Sequence[OuterPrograms]) -> dict[int, NamedSharding]:
    """Return how each leaf is stored, in device memory."""
    found = {i: s for p in programs for i, s in p.shardings.items()}
    return {i: NamedSharding(s.mesh, s.spec) for i, s in sorted(found.items())}


def _form(
    state: TrainState, programs: Sequence[OuterPrograms], num: int
) -> tuple[dict[Path, Any], dict[Path, tuple[int, ...]]]:
    """Return the shapes of outer arrays as they are stored, and their natural shapes."""
    leaves, paths, shardings = jax.tree.leaves(state.params), _paths(state), _shardings(programs)
    arrays, natural = {}, {}
    for kind in range(num):
        for i, sharding in shardings.items():
            name = _name(kind, paths[i])
            arrays[name] = jax.ShapeDtypeStruct(leaves[i].shape, jnp.float32, sharding=sharding)
            natural[name] = state.placements[0][i].shape
    return arrays, natural


def _spread(programs: Sequence[OuterPrograms], state: TrainState) -> Any:
    """Return a function from the vectors of all fragments to leaves."""
    shardings, leaves = _shardings(programs), jax.tree.leaves(state.params)
    shapes = {i: s.shard_shape(leaves[i].shape) for i, s in shardings.items()}

    def local(vectors: list[jax.Array]) -> Leaves:
        found = {i: jnp.zeros(shape, jnp.float32) for i, shape in shapes.items()}
        for program, vector in zip(programs, vectors, strict=True):
            own = {i: found[i] for i in program.fragment.leaves}
            found |= program.fragment.put(own, vector[0])
        return found

    specs = {i: s.spec for i, s in shardings.items()}
    return programs[0].compiled(local, ([programs[0].rows] * len(programs),), specs)


def _take(programs: Sequence[OuterPrograms]) -> Any:
    """Return a function from leaves to the vectors of all fragments."""

    def local(leaves: Leaves) -> list[jax.Array]:
        return [p.fragment.take(leaves)[None] for p in programs]

    specs = {i: s.spec for i, s in _shardings(programs).items()}
    return programs[0].compiled(local, (specs,), [programs[0].rows] * len(programs))
