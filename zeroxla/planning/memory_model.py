"""Memory of one device in a planned step, by what it holds."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
from rich.table import Table

from zeroxla.inspect.phases import phase_of
from zeroxla.mesh.axes import world_size
from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.planning.wire_bytes import KINDS
from zeroxla.program.report import Report, format_bytes
from zeroxla.program.trace import Equation
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

GATHERED, GRADIENTS, ACTIVATIONS = "gathered leaves", "gradients", "activations"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan(Report):
    """Bytes of one device: what it stores between steps, and what a step has when it has most.

    Attributes:
      parameter_bytes: shards of the float32 master.
      optimizer_bytes: of the optimizer's state.
      wire_bytes: what wires remember: errors fed back, kept copies.
      other_bytes: the model's other state, the batch.
      gathered_bytes: leaves that are whole, or on their way, at the peak.
      gradient_bytes: at the peak.
      activation_bytes: at the peak: what forward leaves for backward, secondary shards among it,
        and what is being computed.
      secondary_bytes: of secondary shards when all are there; counted in the two above, if they
        are not on the host.
      offloaded_bytes: of the device's state, in its host's memory; not counted above.
      disk_bytes: of the device's state, on its host's disk; the file has room for it twice.
      secondary_on_host: secondary shards are in the host's memory.
    """

    parameter_bytes: int
    optimizer_bytes: int
    wire_bytes: int
    other_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    activation_bytes: int
    secondary_bytes: int
    offloaded_bytes: int = 0
    disk_bytes: int = 0
    secondary_on_host: bool = False

    @staticmethod
    def of(step: Step, state: TrainState, batch: Any, peak: Counter[str]) -> MemoryPlan:
        """Put a step's figures together.

        Args:
          step, state, batch: shapes.
          peak: bytes by kind, as `kind_of` names them.
        """
        rows = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
        wiring = step.programs.wiring
        others = (state.model_state, state.step, state.loss_scale)
        return MemoryPlan(
            parameter_bytes=shard_bytes(state.params),
            optimizer_bytes=shard_bytes(state.opt_state),
            offloaded_bytes=shard_bytes((state.params, state.opt_state), place="host"),
            disk_bytes=shard_bytes((state.params, state.opt_state), place="disk"),
            wire_bytes=shard_bytes(state.wire_state),
            other_bytes=shard_bytes(others) + rows // world_size(step.mesh),
            gathered_bytes=peak[GATHERED],
            gradient_bytes=peak[GRADIENTS],
            activation_bytes=peak[ACTIVATIONS],
            secondary_bytes=sum(map(wiring.secondary_bytes, step.programs.layout(state))),
            secondary_on_host=wiring.collectives.gathers.secondary_on_host,
        )

    @property
    def state_bytes(self) -> int:
        """What is there between steps, the batch included."""
        return self.parameter_bytes + self.optimizer_bytes + self.wire_bytes + self.other_bytes

    @property
    def everywhere_bytes(self) -> int:
        """As `state_bytes`, with what is not on the device."""
        return self.state_bytes + self.offloaded_bytes + self.disk_bytes

    @property
    def host_bytes(self) -> int:
        """What is in the host's memory for this device: at most, in a step."""
        return self.offloaded_bytes + (self.secondary_bytes if self.secondary_on_host else 0)

    @property
    def temporary_bytes(self) -> int:
        """What is there in a step alone."""
        return self.gathered_bytes + self.gradient_bytes + self.activation_bytes

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.temporary_bytes

    def parts(self) -> dict[str, int]:
        """Return the bytes by name; they add up to the total."""
        return {
            "parameters": self.parameter_bytes,
            "optimizer state": self.optimizer_bytes,
            "memory of wires": self.wire_bytes,
            "other state and batch": self.other_bytes,
            GATHERED: self.gathered_bytes,
            GRADIENTS: self.gradient_bytes,
            ACTIVATIONS: self.activation_bytes,
        }

    def table(self) -> Table:
        """Return the table for a rich console."""
        table = Table(title="Memory of one device", title_justify="left")
        table.add_column("part")
        table.add_column("", justify="right")
        for name, num_bytes in self.parts().items():
            if num_bytes:
                table.add_row(name, format_bytes(num_bytes))
        table.add_section()
        table.add_row("in all", format_bytes(self.total_bytes))
        if self.secondary_bytes:
            which = "on the host" if self.secondary_on_host else "of these"
            table.add_row(f"{which}, secondary shards", format_bytes(self.secondary_bytes))
        if self.offloaded_bytes:
            table.add_row("its state in the host's memory", format_bytes(self.offloaded_bytes))
        if self.disk_bytes:
            table.add_row("its state on the host's disk", format_bytes(self.disk_bytes))
        return table


def kind_of(eq: Equation, path: str) -> str:
    """Return what an equation makes, by the scopes that it is in."""
    phase = phase_of(path, KINDS.get(eq.name, ""))
    if phase.endswith("gather"):
        return GATHERED
    if phase == "reduce" or (phase == "backward" and eq.name == "scan"):
        return GRADIENTS
    return ACTIVATIONS
