"""The shapes of a step's states, found by tracing alone, and whether a given state has them.

Come here to see when a step traces the model without computing anything.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from zeroxla.mesh.placement import Placement
from zeroxla.program.shapes import shapes_of, shapes_on, structure_of
from zeroxla.step.checks import keys_named
from zeroxla.step.disk.steps import with_disk_shapes
from zeroxla.step.model_flops import model_flops
from zeroxla.step.notices import (
    layouts_of_the_model,
    useless_beside_reuse,
    useless_on_leaves,
    warn,
)
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState, state_shardings
from zeroxla.step.state_checks import check_model, check_state, trainable_shapes
from zeroxla.step.update import check_extra_arguments


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedShapes:
    """The shapes of the model and of the batch for which placements were decided last.

    If a step is given a state before it has decided any, they come from that call.

    Attributes:
      params: the parameters.
      placements: the placement of each parameter, in flattened order.
      model_state: the model's other collections.
      batch: the global batch.
      key: a PRNG key.
    """

    params: Any
    placements: tuple[Placement, ...]
    model_state: Any
    batch: Any
    key: Any


class StateShapes:
    """Finds the shapes of states, and checks states that are given to a step.

    Attributes:
      traced: the shapes that were traced; None before the first batch.
    """

    def __init__(self, programs: Programs) -> None:
        self.traced: TracedShapes | None = None
        self._programs = programs
        self._fitting: set[Any] = set()  # structures of states that have been checked
        self._decided: tuple[Any, TrainState] | None = None  # of the newest batch
        self._is_first = True

    def decide(self, key: jax.Array, batch: Any) -> TrainState:
        """Decide the placements; return the shapes of the state, without shardings.

        The first call also warns of options that touch no leaf of the model.

        Raises:
          ValueError: the optimizer needs arguments that a step does not have.
        """
        programs = self._programs
        batch, key = shapes_of((batch, key))
        leaves, tree = jax.tree.flatten((batch, key))
        given = tree, tuple((x.shape, x.dtype) for x in leaves)
        if self._decided is not None and self._decided[0] == given and self.traced is not None:
            return self._decided[1]
        with programs.tracing() as ignored, keys_named(batch):
            placements = programs.placements(key, batch)
            make = functools.partial(programs.init, placements=placements)
            shapes = jax.eval_shape(make, key, batch)
        self.traced = TracedShapes(
            params=shapes.params,
            placements=placements[0],
            model_state=shapes.model_state,
            batch=batch,
            key=key,
        )
        if self._is_first:
            layout = programs.layout(shapes)
            check_extra_arguments(programs.optimizer, trainable_shapes(layout))
            self._is_first = False
            warn(layouts_of_the_model(ignored), stacklevel=4)
            warn(useless_on_leaves(programs.config, layout), stacklevel=4)
            if programs.pipeline is None or programs.weights == "tick":
                warn(useless_beside_reuse(programs.config, layout), stacklevel=4)
        self._decided = given, shapes
        return shapes

    def placed(self, shapes: TrainState) -> TrainState:
        """Return the shapes of a state with their shardings; a leaf on disk as a `DiskShape`."""
        shardings = state_shardings(shapes, self._programs.mesh)
        return with_disk_shapes(shapes_on(shapes, shardings))

    @property
    def last_batch(self) -> Any:
        """The shapes of the traced batch.

        Raises:
          ValueError: no batch was traced.
        """
        if self.traced is None:
            raise ValueError(
                "the step has seen no batch, and the state's shapes may depend on it; call "
                "step.abstract_state(batch) first, or pass on what that returns"
            )
        return self.traced.batch

    def model_flops(self) -> float:
        """Return the FLOPs of the model's products in a step of the traced batch, on all devices.

        Raises:
          ValueError: no batch was traced.
        """
        batch, known = self.last_batch, self.traced
        assert known is not None
        return model_flops(
            self._programs, known.params, known.placements, known.model_state, batch, known.key
        )

    def check(self, state: TrainState, batch: Any) -> None:
        """Check that a state fits the optimizer and the model, once for each structure of states.

        Raises:
          ValueError: it does not fit.
        """
        programs, structure = self._programs, structure_of(state)
        if structure not in self._fitting:
            layout = programs.layout(state)
            check_extra_arguments(programs.optimizer, trainable_shapes(layout))
            check_state(state, programs.optimizer, layout)
            batch, key = shapes_of((batch, state.key))
            with programs.tracing(), keys_named(batch):
                rows = jax.eval_shape(programs.first_rows, batch)
                params, model_state = jax.eval_shape(programs.adapted.init, key, rows)
            check_model(state, params)
            if self.traced is None:
                self._decided = None
                self.traced = TracedShapes(
                    params=params,
                    placements=state.placements[0],
                    model_state=model_state,
                    batch=batch,
                    key=key,
                )
            self._fitting.add(structure)
