"""`CompiledStep`: the jitted functions of a step, with what a memory budget makes of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from zeroxla.step.memory.fit import MemoryFitter
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.live_fit import fit_by_live_ranges
from zeroxla.step.memory.out_of_memory import explained
from zeroxla.step.memory.step_memory import StepMemory
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState


@dataclasses.dataclass(slots=True, eq=False)
class CompiledStep:
    """Jitted functions of a state and a batch. Call its methods where programs are traced.

    Args:
      programs: the functions.
      jit: jits a program as the step does.
    """

    programs: Programs
    jit: Callable[..., Any]
    _train: Any = dataclasses.field(init=False)
    _grad: Any = dataclasses.field(init=False)
    _fitter: MemoryFitter | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._train = self.jit(self.programs.train, donate_argnums=0)
        self._grad = self.jit(self.programs.gradients)
        with_budget = self.programs.config.memory is not None
        self._fitter = MemoryFitter(self.programs, self.jit) if with_budget else None

    def train(self, state: TrainState, batch: Any) -> Any:
        """Return the jitted step for a state and a batch, or for their shapes."""
        return self._fitter.fitted(state, batch).train if self._fitter else self._train

    def grad(self, state: TrainState, batch: Any) -> Any:
        """Return the jitted loss and gradients, which keep what the step keeps."""
        return self._fitter.fitted(state, batch).grad if self._fitter else self._grad

    def memory(self, state: TrainState, batch: Any) -> StepMemory:
        """Return what a device holds over a step, from its trace.

        Args:
          state, batch: the step's arguments, or their shapes with shardings.

        With a memory budget it is that of the programs which fit by the compiler, or, before the
        first step of such shapes, of those which fit by live ranges.
        """
        fitter = self._fitter
        if fitter is None:
            return StepMemory.of(self.programs, state, batch)
        known = fitter.known(state, batch)
        if known is not None:
            return StepMemory.of(known.programs, state, batch)
        chosen = fit_by_live_ranges(self.programs, state, batch, fitter.total_bytes)[1]
        return StepMemory.of(chosen, state, batch)

    def explained(
        self, name: str, state: TrainState, batch: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors of too little memory are explained; see `explained`."""

        def programs() -> Programs:
            known = self._fitter and self._fitter.known(state, batch)
            return known.programs if known else self.programs

        return explained(name, programs, state, batch)

    @property
    def fit(self) -> MemoryFit | None:
        """What was decided for the newest shapes; None without a budget, or before."""
        return self._fitter.newest if self._fitter else None
