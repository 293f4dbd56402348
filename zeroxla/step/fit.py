"""Fits a state that other options have made to the options of a step: its places and its wires."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.shapes import shapes_of, shapes_on, structure_of
from zeroxla.step.disk.steps import DiskSteps
from zeroxla.step.moves import moved
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState, light, state_shardings
from zeroxla.step.state_shapes import StateShapes
from zeroxla.wire.wire_state import WireState


class StateFitter:
    """Fits states to a step. A state that fits passes at the cost of reading its structure."""

    def __init__(
        self, programs: Programs, disk: DiskSteps, shapes: StateShapes, jit: Callable[..., Any]
    ) -> None:
        self._programs, self._disk, self._shapes, self._jit = programs, disk, shapes, jit
        # Structures of states that fit, and those whose wire state does.
        self._fitting: set[Any] = set()
        self._wired: set[Any] = set()

    def fitted(self, state: TrainState) -> TrainState:
        """Return the state with its arrays where the options say, and with their wire state.

        What has to move is donated. See `moved` for the errors.
        """
        found = _structure_and_folders(state)
        if found in self._fitting:
            return state
        state = self.wired(moved(state, self._programs, self._disk))
        self._fitting.add(_structure_and_folders(state))
        return state

    def wired(self, state: TrainState) -> TrainState:
        """Return the state with a wire state that fits the options, its arrays where they are."""
        structure = structure_of(state)
        if structure in self._wired:
            return state
        wire_state = self._make(self._shapes.last_batch)
        expected = jax.eval_shape(wire_state, light(shapes_of(state)))
        found = state.wire_state
        if found is None if expected is None else expected.fits(found):
            self._wired.add(structure)
            return state
        if expected is not None:
            expected = self._disk.call("wire state", self._jit(wire_state), state)
        return dataclasses.replace(state, wire_state=expected)

    def wired_shapes(self, state: Any, batch: Any) -> Any:
        """Return shapes of a state with those of the wire state that the options need."""
        wires = jax.eval_shape(self._make(batch), light(shapes_of(state)))
        wired = dataclasses.replace(state, wire_state=wires)
        places = state_shardings(wired, self._programs.mesh).wire_state
        return dataclasses.replace(state, wire_state=shapes_on(wires, places))

    def _make(self, batch: Any) -> Callable[[TrainState], WireState | None]:
        return functools.partial(self._programs.wire_state, batch=shapes_of(batch))


def _structure_and_folders(state: TrainState) -> tuple[Any, frozenset[Path]]:
    leaves = jax.tree.leaves((state.params, state.opt_state))
    folders = frozenset(x.file.path.parent for x in leaves if isinstance(x, DiskArray))
    return structure_of(state), folders
