"""`CompiledStep`: the jitted functions of a step, with what a memory budget makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from zeroxla.step.memory.fit import MemoryFitter
from zeroxla.step.memory.fit_report import MemoryFit
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

    @property
    def fit(self) -> MemoryFit | None:
        """What was decided for the newest shapes; None without a budget, or before."""
        return self._fitter.newest if self._fitter else None
