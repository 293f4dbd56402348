"""`MemoryFitter`: compiles a step until the compiler's figure fits the memory that it may take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from zeroxla.config.memory import DEVICE
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.choose import Keeping
from zeroxla.mesh.axes import platform_of
from zeroxla.mesh.processes import progress
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.shapes import structure_of
from zeroxla.step.memory.device_facts import device_bytes, rates_of
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.larger_meshes import larger_meshes
from zeroxla.step.memory.out_of_memory import BudgetError
from zeroxla.step.memory.refusal import refusal
from zeroxla.step.memory.step_memory import StepMemory, measured
from zeroxla.step.memory.variants import fit_variants
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState


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
          BudgetError: the least that a step of this batch can take is more than there is.

        Cost: once for a structure, the step is traced and compiled up to seven times (`MAX_TRIES`).
        """
        key = structure_of((state, batch))
        if key not in self._fitted:
            with progress.compiling():
                self._fitted[key] = self._fit(state, batch)
        self.newest = self._fitted[key].report
        return self._fitted[key]

    def known(self, state: TrainState, batch: Any) -> FittedPrograms | None:
        """Return the programs that were found to fit for these shapes; None before that."""
        return self._fitted.get(structure_of((state, batch)))

    @property
    def total_bytes(self) -> int:
        """The bytes of a device that the step may take.

        Raises:
          ValueError: they are those that the device has, and it does not say how many.
        """
        memory = self._programs.config.memory
        assert memory is not None
        return device_bytes(self._programs.mesh) if memory == DEVICE else int(memory)

    def _fit(self, state: TrainState, batch: Any) -> FittedPrograms:
        mesh = self._programs.mesh
        total, rates = self.total_bytes, functools.partial(rates_of, mesh)
        trained: dict[Programs, Any] = {}

        def measure(programs: Programs, budget: ActivationBudget) -> tuple[int, int]:
            train = trained[programs] = self._jit(
                programs.train, donate_argnums=0, compiler_options=programs.compiler_options
            )
            taken = MemoryReport.of(train.lower(state, batch).compile())
            on_host = _counted_on_host(state, budget.newest) if self._on_cpu else (0, 0)
            return taken.total_bytes - sum(on_host), taken.temp_bytes - on_host[1]

        def live(programs: Programs, _: ActivationBudget) -> tuple[int, int]:
            return measured(programs, state, batch)

        report, programs = fit_variants(self._programs, batch, total, rates, measure, live)
        config = programs.config
        if report.best is None:
            memory = StepMemory.of(programs, state, batch)
            larger = larger_meshes(memory, mesh, batch, config.num_micro_batches, total)
            text = refusal(report, mesh, batch, memory, larger)
            raise BudgetError(text, memory, report.smallest.num_bytes)
        grad = self._jit(programs.gradients, compiler_options=programs.compiler_options)
        return FittedPrograms(programs=programs, train=trained[programs], grad=grad, report=report)


def _counted_on_host(state: Any, keeping: Keeping | None) -> tuple[int, int]:
    """Return the bytes in the host's memory of a state, and of what forward keeps there. The CPU's
    compiler counts them among arguments and temporaries."""
    of_state = shard_bytes((state.params, state.opt_state), place="host")
    return of_state, int(keeping.host_bytes) if keeping else 0
