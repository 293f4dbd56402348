"""Moves a live state to the places that other offload options ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from zeroxla.offload.choose import StatePlacements, offloaded
from zeroxla.offload.disk.disk_array import DiskArray, in_memory
from zeroxla.program.shapes import shapes_on
from zeroxla.step.disk.steps import DiskSteps, has_disk, with_disk_shapes
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState, state_shardings


def moved(state: TrainState, programs: Programs, disk: DiskSteps) -> TrainState:
    """Return a state with each array where the options say. It may be there already.

    Args:
      state: a state of arrays. Arrays that move are donated.
      programs: the functions of the step that is to take it.
      disk: makes the file of a state on disk.

    Raises:
      ValueError: the mesh does not allow the options, or, in every process, the folder of one
        cannot be written.
      NotImplementedError: the model does not allow the options.
      OSError: the disk fails.
    """
    wanted = _wanted(state.placements, programs)
    leaves, tree = jax.tree.flatten((state.params, state.opt_state))
    result = dataclasses.replace(state, placements=wanted)
    rewritten = has_disk(result) and _needs_file(state.placements, wanted, leaves, programs)
    if wanted == state.placements and not rewritten:
        return state
    programs.check_offload()
    found: list[Any] = []
    on_disk = _written(result, leaves, programs, disk) if rewritten else {}
    before = [p for placements in state.placements for p in placements]
    after = [p for placements in wanted for p in placements]
    for i, (x, old, new) in enumerate(zip(leaves, before, after, strict=True)):
        if i in on_disk:
            x = on_disk[i]
        elif old.memory != new.memory:
            x = _put(x, new.sharding(programs.mesh))
        found.append(x)
    params, opt_state = tree.unflatten(found)
    return dataclasses.replace(result, params=params, opt_state=opt_state)


def _put(x: jax.Array | DiskArray, sharding: NamedSharding) -> jax.Array:
    """Return an array in another memory. The old one is deleted: JAX donates none between kinds of
    memory."""
    found = jax.device_put(in_memory(x), sharding)
    if isinstance(x, jax.Array):
        found.block_until_ready()
        x.delete()
    return found


def _wanted(placements: StatePlacements, programs: Programs) -> StatePlacements:
    """Return the placements of a state under the step's options."""
    params, opt_state = (
        [dataclasses.replace(p, memory=None) for p in placed] for placed in placements
    )
    return offloaded(programs.config.offload, params, opt_state)


def _needs_file(
    before: StatePlacements, after: StatePlacements, leaves: Sequence[Any], programs: Programs
) -> bool:
    """Return whether the arrays that belong on disk are not yet in one file in the right folder."""
    old, new = (
        [p.is_on_disk for placements in placed for p in placements] for placed in (before, after)
    )
    folder = programs.config.offload.path
    assert folder is not None, "a ZeroConfig with arrays on disk has a folder"
    place = Path(folder).expanduser().resolve()
    files = {x.file.path for x in leaves if isinstance(x, DiskArray)}
    return old != new or any(place not in path.parents for path in files)


def _written(
    state: TrainState, leaves: Sequence[Any], programs: Programs, disk: DiskSteps
) -> dict[int, DiskArray]:
    """Write the arrays of a state that belong on disk to a new file, one after another.

    Args:
      state: the state, with its new placements.
      leaves: its parameters and its optimizer's state, where they are now.
      programs, disk: as for `moved`.

    Returns:
      The arrays on disk, by position.
    """
    light = dataclasses.replace(state, wire_state=None)
    writer = disk.writer(with_disk_shapes(shapes_on(light, state_shardings(light, programs.mesh))))
    try:
        for i in writer.shapes:
            writer.write(i, in_memory(leaves[i]))
        found = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    for i in found:
        if isinstance(leaves[i], jax.Array):
            leaves[i].delete()
    return found
