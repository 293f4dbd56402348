"""`ExplainedTrace`: a step's trace, simulated on a target with every event named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.planning.budget import TracedStep
from zeroxla.planning.explain.origins import Origins
from zeroxla.planning.lanes import TimeLine
from zeroxla.planning.simulation import Simulation
from zeroxla.planning.target import Target
from zeroxla.program.live.kinds import RESIDUALS
from zeroxla.program.live.liveness import Scope
from zeroxla.program.live.peak import live_bytes
from zeroxla.program.live.residents import Resident, ResidentLabels, largest_first
from zeroxla.step.memory.step_memory import units_of
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExplainedTrace:
    """A step's trace on a target.

    Attributes:
      target: the devices.
      simulation: what a device does in a step.
      names: names the events.
      time: the time line of the gradients, without the update.
      residuals: what forward leaves for backward at the peak of memory, the largest first.
      total_bytes: all that a device holds at the peak.
      leaf_shapes: the natural shapes of the leaves, by name.
    """

    target: Target
    simulation: Simulation
    names: Origins
    time: TimeLine
    residuals: tuple[Resident, ...]
    total_bytes: int
    leaf_shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(step: Step, batch: Any, target: Target) -> ExplainedTrace:
        """Trace a step and simulate it.

        Args:
          step: a step on the target's abstract mesh.
          batch: the shapes of a global batch.
          target: the devices.
        """
        programs, state = step.programs, step.abstract_state(batch)
        traced = TracedStep.of(step, state, batch, target)
        local, layout = traced.traced.local, programs.layout(state)
        with programs.tracing():
            owners = programs.describe_owners(state)
            flow = traced.traced.flow(programs, state)
            units = units_of(programs, layout, state, batch)
        simulation = Simulation.of(
            step, traced.traced.program, local, traced.traced.splits, traced.memory, owners
        )
        leaf_names = [leaf.path for leaf in layout]
        names = Origins(target=target, flow=flow, leaf_names=leaf_names, units=units, program=local)
        labels = ResidentLabels(flow=flow, leaf_names=leaf_names, units=units)
        held = live_bytes(Scope.of(local, target.device.platform), labels).most
        return ExplainedTrace(
            target=target,
            simulation=simulation,
            names=names,
            time=simulation.on(target, names=names, as_issued=True, with_update=False),
            residuals=tuple(x for x in largest_first(held) if x.kind == RESIDUALS),
            total_bytes=traced.memory.total_bytes,
            leaf_shapes={leaf.path: leaf.placement.shape for leaf in layout},
        )

    def with_update(self) -> TimeLine:
        """Return the time line with the update, which counts by its bytes."""
        return self.simulation.on(self.target, names=self.names, as_issued=True)


def rewritable(step: Step, batch: Any) -> tuple[tuple[Finding, ...], str]:
    """Return what `rewrite=True` would change in a step, and a remark if that cannot be known.

    Args:
      step: a step on the target's abstract mesh.
      batch: the shapes of a global batch.
    """
    if step.config.rewrite:
        return (), ""
    config: ZeroConfig = dataclasses.replace(step.config, rewrite=True, memory=None)
    try:
        other = step.with_config(config)
        other.abstract_state(batch)
        other.describe()
    except (ValueError, NotImplementedError) as error:
        return (), f"Attention and losses were not searched: {error}."
    report = other.programs.rewrites
    return () if report is None else report.rewritten, ""


def least_bytes(step: Step, batch: Any, target: Target) -> int:
    """Return the least memory of a device that a budget can make of a step, by live ranges.

    Args: as for `ExplainedTrace.of`. Cost: two or three traces.
    """
    other = step.with_config(dataclasses.replace(step.config, memory=1))
    fit = TracedStep.of(other, other.abstract_state(batch), batch, target).fit
    assert fit is not None, "there is a budget"
    return fit.smallest.num_bytes
