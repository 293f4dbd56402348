"""The stages of a model as programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.pipeline.micro_batches import MicroBatches
from zeroxla.pipeline.stage import Stage, StageProgram
from zeroxla.pipeline.stage_ends import HeldLeaves, StageEnds
from zeroxla.pipeline.stage_state import check_keeps
from zeroxla.pipeline.stage_wire_state import StagesWireStatePlan
from zeroxla.program.paths import paths_of
from zeroxla.program.shapes import shapes_of
from zeroxla.program.trace import is_float
from zeroxla.step.metrics import check_metrics
from zeroxla.wire.resolve import Wiring


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedStages:
    """The stages of a model as programs, for one shape of micro-batches.

    Attributes:
      programs: the program of each stage.
      without_ties: the same programs, whose own ties are none by data; the same objects where
        ties by data, or calls apart, are not needed.
      wire_plan: makes and packs the ranks' wire state.
    """

    programs: list[StageProgram]
    without_ties: list[StageProgram]
    wire_plan: StagesWireStatePlan

    @staticmethod
    def make(
        stages: Sequence[Stage],
        wire_plan: StagesWireStatePlan,
        shapes: tuple[Any, Any, Any],
        *,
        wiring: Wiring,
        unit_elements: int | None,
        limits: FetchLimits,
        apart: bool,
    ) -> TracedStages:
        """Trace stages and plan their gathers.

        Args:
          stages, wire_plan: the stages, and what packs their wire state.
          shapes: of one device's micro-batch, of its key and of the model state.
          wiring: how leaves travel between the devices of a rank.
          unit_elements, limits: as for a model without stages.
          apart: whether forwards and backwards are to be split into calls.
        """
        rows, key, model_state = shapes
        programs: list[StageProgram] = []
        without_ties: list[StageProgram] = []
        x = None
        for number, stage in enumerate(stages):
            make = functools.partial(
                StageProgram.make,
                stage,
                wire_plan.held.layout_of(number),
                x,
                rows,
                key,
                jax.tree.leaves(model_state),
                unit_elements=unit_elements,
                limits=limits,
            )
            program, x = make(wiring=wiring)
            programs.append(program)
            if apart and wiring.collectives.ties_by_data:
                program, _ = make(wiring=_without_ties(wiring))
            without_ties.append(program)
        _check_metrics_of(programs[-1])
        state_paths = [path for path, _ in paths_of(model_state)]
        check_keeps([program.keeps for program in programs], state_paths)
        return TracedStages(programs=programs, without_ties=without_ties, wire_plan=wire_plan)

    def arguments(
        self,
        ends: StageEnds,
        held: HeldLeaves,
        micro_batches: MicroBatches,
        state: Sequence[jax.ShapeDtypeStruct],
        scale: jax.Array,
    ) -> list[tuple[Any, ...]]:
        """Return the shapes of the arguments of each stage's `StageProgram.backward`."""
        rows, key = micro_batches.shapes()
        found = []
        for stage, program in enumerate(self.programs):
            sources, resident = shapes_of(ends.unpack(stage, held))
            given = [x for x in program.outputs if is_float(x.dtype)]
            x = list(program.inputs)
            found.append((sources, resident, x, rows, key, list(state), given, shapes_of(scale)))
        return found


def _check_metrics_of(program: StageProgram) -> None:
    """Check the names of the metrics that the last stage returns."""
    loss, metrics = program.tree.unflatten(range(program.tree.num_leaves))
    check_metrics(jax.tree.structure((loss, metrics, {})))


def _without_ties(wiring: Wiring) -> Wiring:
    """Return a wiring whose ties are none by data."""
    collectives = dataclasses.replace(wiring.collectives, ties_by_data=False)
    return dataclasses.replace(wiring, collectives=collectives)
