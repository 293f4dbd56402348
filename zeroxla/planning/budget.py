"""`TracedStep`: a step's program on one device, after a memory budget had its say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zeroxla.config.memory import DEVICE
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.residual_graph import Rates
from zeroxla.offload.disk.desk import with_tickets
from zeroxla.offload.disk.disk_array import DiskShape
from zeroxla.offload.update.streamed_update import sub_group_bytes
from zeroxla.planning.memory_model import MemoryPlan, kind_of
from zeroxla.planning.target import HOST, Target
from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import peak_bytes
from zeroxla.program.live.splits import Splits, splits_of
from zeroxla.program.trace import Program, trace
from zeroxla.program.walk import local_of
from zeroxla.step.memory.budget_search import search_budget
from zeroxla.step.memory.fit_report import MemoryFit
from zeroxla.step.programs import Programs
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedStep:
    """A step's program.

    Attributes:
      program: the program. If parameters are on disk, it computes the gradients, which reads them.
      local: the part of it that each device runs.
      splits: over how many devices its values are split.
      memory: the memory of a device.
      fit: what was decided so that it fits; None without a budget.
    """

    program: Program
    local: Program
    splits: Splits
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

        total, rates = int(config.memory), rates_on(target, config)
        fit, programs = search_budget(step.programs, total, rates, measure)
        fit = dataclasses.replace(fit, source="by the live ranges of its trace")
        return dataclasses.replace(found[programs], fit=fit)


def for_target(config: ZeroConfig, target: Target) -> ZeroConfig:
    """Return the config with the bytes of the target's devices for `memory="device"`."""
    if config.memory != DEVICE:
        return config
    return dataclasses.replace(config, memory=int(target.device.usable_bytes))


def rates_on(target: Target, config: ZeroConfig) -> Rates:
    """Return what computing again and moving costs on a target's devices."""
    device = target.device
    on_host = config.offload.activations == "host"
    return Rates(
        flops_per_s=device.rate(config.compute_dtype),
        bytes_per_s=device.memory_rate,
        gathered_bytes_per_s=target.links["device"].bytes_per_s,
        host_bytes_per_s=target.links[HOST].bytes_per_s if on_host else None,
    )


def _traced(
    step: Step, programs: Programs, state: TrainState, batch: Any, target: Target
) -> TracedStep:
    fun: Callable[..., Any] = programs.train
    traced = state
    leaves, tree = jax.tree.flatten(state.params)
    if any(isinstance(x, DiskShape) for x in leaves):
        tickets = with_tickets(leaves, state.placements[0])
        fun = programs.begin
        traced = dataclasses.replace(state, params=tree.unflatten(tickets))
    with programs.tracing():
        program = trace(fun, traced, batch, opened=compat.forward_jaxpr)[0]
    local = local_of(program)
    splits = splits_of(program, jax.tree.leaves((state, batch)))
    peak = peak_bytes(Scope.of(local, target.device.platform), kind_of)
    arriving_bytes = sub_group_bytes(program, splits, step.config.offload.buffers)
    memory = MemoryPlan.of(step, state, batch, peak, arriving_bytes)
    return TracedStep(program=program, local=local, splits=splits, memory=memory)
