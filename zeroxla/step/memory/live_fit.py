"""`fit_by_live_ranges`: finds what a step keeps so that it fits, without compiling anything."""

from __future__ import annotations

import dataclasses
from typing import Any

from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.step.memory.budget_search import search_budget
from zeroxla.step.memory.device_facts import rates_of
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.step_memory import measured
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState


def fit_by_live_ranges(
    programs: Programs, state: TrainState, batch: Any, total: int
) -> tuple[MemoryFit, Programs]:
    """Find what a step keeps so that it fits by the live ranges of its trace.

    Args:
      programs: the functions of a step.
      state, batch: its arguments, or their shapes with shardings.
      total: the bytes that it may take.

    Returns:
      What was tried; and the programs of the best try, or of the smallest one if none fits.

    Cost: up to six traces.
    """
    rates = rates_of(programs.mesh, programs.config)

    def measure(programs: Programs, budget: ActivationBudget) -> tuple[int, int]:
        return measured(programs, state, batch)

    fit, chosen = search_budget(programs, total, rates, measure)
    return dataclasses.replace(fit, source="by the live ranges of its trace"), chosen


def least_bytes(programs: Programs, state: TrainState, batch: Any) -> int | None:
    """Return the least `memory=` at which a step fits by the live ranges of its trace; None for a
    pipeline, whose stages keep what their schedule says.

    Cost: two or three traces.
    """
    if programs.pipeline is not None:
        return None
    return fit_by_live_ranges(programs, state, batch, 1)[0].smallest.num_bytes
