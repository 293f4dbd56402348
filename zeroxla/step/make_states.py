"""`FirstStateMaker`: makes the first states of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from zeroxla.mesh.batches import put_key
from zeroxla.mesh.processes.same_program import ProgramCalls
from zeroxla.program.shapes import structure_of
from zeroxla.step.batches import StepBatches
from zeroxla.step.checks import check_key
from zeroxla.step.disk.steps import DiskSteps, has_disk
from zeroxla.step.first_weights import first_weights
from zeroxla.step.notices import fresh_model_state, warn
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState, state_shardings
from zeroxla.step.state_shapes import StateShapes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstStateMaker:
    """Makes the first states of a step.

    Attributes:
      programs: the step's functions.
      shapes: decides the shapes of states.
      batches: checks batches, and puts them on the mesh.
      disk: makes states that are on disk.
      jit: jits a program as the step does.
      run: calls a jitted program: (name, program, *arguments) -> its results.
    """

    programs: Programs
    shapes: StateShapes
    batches: StepBatches
    disk: DiskSteps
    jit: Callable[..., Any]
    run: ProgramCalls
    _jitted: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict, init=False)

    def init(self, key: jax.Array, batch: Any) -> TrainState:
        """Make a state at random; see `Step.init`."""
        key, batch = check_key(key), self.batches.checked(batch)
        shapes = self.shapes.decide(key, batch)
        make = functools.partial(self.programs.init, placements=shapes.placements)
        args = put_key(key, self.programs.mesh), self.batches.put(batch)
        shardings = state_shardings(shapes, self.programs.mesh)
        return self._make("init", make, shapes, shardings, *args)

    def init_from(
        self, params: Any, key: jax.Array, batch: Any, *, model_state: Any, donate: bool
    ) -> TrainState:
        """Make a state for given parameters; see `zeroxla.init_from`."""
        key, mesh = check_key(key), self.programs.mesh
        batch = self.shapes.last_batch if batch is None else self.batches.checked(batch)
        shapes = self.shapes.placed(self.shapes.decide(key, batch))
        params, model_state = first_weights(
            params,
            model_state,
            adapted=self.programs.adapted,
            shapes=shapes,
            mesh=mesh,
            key=key,
            donate=donate,
        )
        if model_state is None:
            warn(fresh_model_state(shapes.model_state), stacklevel=4)
        make = functools.partial(self.programs.init_from, placements=shapes.placements)
        rest = dataclasses.replace(state_shardings(shapes, mesh), params=None)
        args = params, model_state, put_key(key, mesh), self.batches.put(batch)
        state = self._make("init_from", make, shapes, rest, *args)
        return dataclasses.replace(state, params=params) if state.params is None else state

    def _make(
        self,
        name: str,
        program: Callable[..., TrainState],
        shapes: TrainState,
        shardings: TrainState,
        *args: Any,
    ) -> TrainState:
        """Run a program that makes a state."""
        with self.programs.tracing():
            if has_disk(shapes):
                shapes = self.shapes.placed(shapes)
                return self.disk.make(name, program, shapes, shardings, *args)
            known = shapes.placements, structure_of(shapes)
            if name not in self._jitted or self._jitted[name][0] != known:
                self._jitted[name] = known, self.jit(program, out_shardings=shardings)
            return self.run(name, self._jitted[name][1], *args)
