"""`MemoryFitter`: compiles a step until the compiler's figure fits the memory that it may take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from zeroxla.config.memory import DEVICE
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.choose import Keeper, Keeping
from zeroxla.mesh.axes import platform_of
from zeroxla.mesh.processes import progress
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.shapes import structure_of
from zeroxla.step.memory.device_facts import device_bytes, rates_of
from zeroxla.step.memory.fit_report import MemoryFit, Try, refusal
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState

MAX_TRIES = 6
WORTH = 0.01
"""Another program is tried if it computes again by this share less than the best that fits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedPrograms:
    """Programs whose activations fit, and the compiled step.

    Attributes:
      programs: the functions.
      train: the jitted step.
      grad: the jitted loss and gradients.
      report: what was decided.
    """

    programs: Programs
    train: Any
    grad: Any
    report: MemoryFit


class MemoryFitter:
    """Finds, for each structure of a state and a batch, what activations a step keeps.

    Args:
      programs: the functions of a step whose config has `memory`.
      jit: jits a program as the step does.
    """

    def __init__(self, programs: Programs, jit: Callable[..., Any]) -> None:
        self._programs, self._jit = programs, jit
        self._on_cpu = platform_of(programs.mesh) == "cpu"
        self._fitted: dict[Any, FittedPrograms] = {}
        self.newest: MemoryFit | None = None

    def fitted(self, state: TrainState, batch: Any) -> FittedPrograms:
        """Return programs that fit. Call it where programs are traced.

        Args:
          state, batch: the step's arguments, or their shapes with shardings.

        Raises:
          ValueError: the least that a step of this batch can take is more than there is.

        Cost: once for a structure, the step is traced and compiled up to `MAX_TRIES` times.
        """
        key = structure_of((state, batch))
        if key not in self._fitted:
            with progress.compiling():
                self._fitted[key] = self._fit(state, batch)
        self.newest = self._fitted[key].report
        return self._fitted[key]

    def _fit(self, state: TrainState, batch: Any) -> FittedPrograms:
        config, mesh = self._programs.config, self._programs.mesh
        assert config.memory is not None
        total = device_bytes(mesh) if config.memory == DEVICE else int(config.memory)
        rates = rates_of(mesh, config.compute_dtype, host=config.offload.activations == "host")
        tries: list[Try] = []
        made: list[FittedPrograms] = []
        limit: float | None = None
        while True:
            budget = ActivationBudget(rates=rates, limit=limit)
            programs = dataclasses.replace(self._programs, activations=budget)
            train = self._jit(programs.train, donate_argnums=0)
            taken = MemoryReport.of(train.lower(state, batch).compile())
            on_host = _counted_on_host(state, budget.newest) if self._on_cpu else (0, 0)
            num_bytes = taken.total_bytes - sum(on_host)
            temp_bytes = taken.temp_bytes - on_host[1]
            tries.append(Try(keeping=budget.newest, num_bytes=num_bytes, temp_bytes=temp_bytes))
            report = MemoryFit(total_bytes=total, tries=tuple(tries))
            grad = self._jit(programs.gradients)
            made.append(FittedPrograms(programs=programs, train=train, grad=grad, report=report))
            if num_bytes <= total and len(tries) == 1:
                break
            limit = _next_limit(tries, total, budget.keeper)
            if limit is None:
                break
        report = made[-1].report
        if report.best is None:
            raise ValueError(refusal(report, mesh, batch))
        return dataclasses.replace(made[tries.index(report.best)], report=report)


def _next_limit(tries: list[Try], total: int, keeper: Keeper) -> float | None:
    """Return the limit of bytes to try next; None if there is nothing more to try.

    The compiler's figure and the model's differ by what the model does not see: gathered leaves,
    gradients, what one segment computes. That difference hardly changes with the choice.
    """
    newest = tries[-1]
    if len(tries) == MAX_TRIES:
        return None
    by_model = (newest.keeping or keeper.everything()).num_bytes
    limit = total - (newest.num_bytes - by_model)
    best_s = min((t.seconds for t in tries if t.num_bytes <= total), default=math.inf)
    for _ in range(MAX_TRIES):
        choice = keeper.within(limit)
        known = next((t for t in tries if t.keeping and t.keeping.is_as(choice)), None)
        if known is None:
            return limit if choice.seconds < best_s * (1 - WORTH) else None
        if known.num_bytes <= total or choice.is_as(keeper.least()):
            return None
        limit = choice.num_bytes * (1 - WORTH)
    return None


def _counted_on_host(state: Any, keeping: Keeping | None) -> tuple[int, int]:
    """Return the bytes in the host's memory of a state, and of what forward keeps there. The CPU's
    compiler counts them among arguments and temporaries."""
    of_state = shard_bytes((state.params, state.opt_state), place="host")
    return of_state, int(keeping.host_bytes) if keeping else 0
