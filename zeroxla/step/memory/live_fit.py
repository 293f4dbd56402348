"""`fit_by_live_ranges`: finds what a step keeps so that it fits, without compiling anything."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.step.memory.device_facts import rates_of
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.step_memory import measured
from zeroxla.step.memory.variants import fit_variants
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

    def measure(programs: Programs, budget: ActivationBudget) -> tuple[int, int]:
        return measured(programs, state, batch)

    rates = functools.partial(rates_of, programs.mesh)
    fit, chosen = fit_variants(programs, batch, total, rates, measure, measure)
    return dataclasses.replace(fit, source="by the live ranges of its trace"), chosen


def least_bytes(programs: Programs, state: TrainState, batch: Any) -> int | None:
    """Return the least `memory=` at which a step fits by the live ranges of its trace; None for a
    pipeline, whose stages keep what their schedule says.

    Cost: two or three traces.
    """
    if programs.pipeline is not None:
        return None
    return fit_by_live_ranges(programs, state, batch, 1)[0].smallest.num_bytes
