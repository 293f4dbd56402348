"""`TracedStep`: a step's program on one device, after a memory budget had its say."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from zeroxla.config.memory import DEVICE
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.planning.target import HOST, Target
from zeroxla.program.live.kinds import kind_of
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import peak_bytes
from zeroxla.step.memory.device_facts import rates_with
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.memory.step_program import StepProgram
from zeroxla.step.memory.variants import fit_variants
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedStep:
    """A step's program, and the memory of a device that runs it.

    Attributes:
      traced: the program.
      memory: the memory of a device.
      fit: what was decided so that it fits; None without a budget.
    """

    traced: StepProgram
    memory: MemoryPlan
    fit: MemoryFit | None = None

    @staticmethod
    def of(step: Step, state: TrainState, batch: Any, target: Target) -> TracedStep:
        """Trace a step; with `memory` in its config, as often as it takes until it fits.

        If nothing fits, it is the program that takes least.

        Args:
          step: the step.
          state, batch: the shapes of its arguments.
          target: the devices.
        """
        config = step.config
        if config.memory is None:
            return _traced(step, step.programs, state, batch, target)
        found: dict[Programs, TracedStep] = {}

        def measure(programs: Programs, budget: ActivationBudget) -> tuple[int, int]:
            found[programs] = _traced(step, programs, state, batch, target)
            memory = found[programs].memory
            return memory.total_bytes, memory.temporary_bytes

        rates = functools.partial(rates_on, target)
        fit, programs = fit_variants(
            step.programs, batch, int(config.memory), rates, measure, measure
        )
        fit = dataclasses.replace(fit, source="by the live ranges of its trace")
        return dataclasses.replace(found[programs], fit=fit)


def for_target(config: ZeroConfig, target: Target) -> ZeroConfig:
    """Return the config with the bytes of the target's devices for `memory="device"`."""
    if config.memory != DEVICE:
        return config
    return dataclasses.replace(config, memory=int(target.device.usable_bytes))


def rates_on(target: Target, config: ZeroConfig) -> DeviceRates:
    """Return what computing again and moving costs on a target's devices."""
    links = target.links
    return rates_with(target.device, links, links[HOST], target.mesh_shape, config)


def _traced(
    step: Step, programs: Programs, state: TrainState, batch: Any, target: Target
) -> TracedStep:
    traced = StepProgram.of(programs, state, batch)
    peak = peak_bytes(Scope.of(traced.local, target.device.platform), kind_of)
    memory = MemoryPlan.of(step, state, batch, peak, traced.sub_group_bytes)
    return TracedStep(traced=traced, memory=memory)
