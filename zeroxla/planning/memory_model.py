"""The memory of one device in a planned step, by kind."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from zeroxla.offload.array_bytes import shard_bytes
from zeroxla.program.live.kinds import ACTIVATIONS, GATHERED, GRADIENTS, SUB_GROUPS
from zeroxla.program.report import Report, format_bytes, table_of_parts
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step
from zeroxla.wire.leaves import Layout, Leaf

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan(Report):
    """Bytes of one device: the state that it stores between steps, and temporaries at the peak.

    The peak is the moment of a step at which the device holds most: while gradients are computed,
    or while a state that is offloaded comes to the device and is updated.

    Attributes:
      parameter_bytes: the shards of the float32 master.
      optimizer_bytes: the optimizer's state.
      wire_bytes: the state of the wires: errors that are fed back, and kept copies.
      other_bytes: the model's other state, and the batch.
      gathered_bytes: leaves that are whole, or on their way, at the peak.
      gradient_bytes: gradients at the peak.
      activation_bytes: what forward keeps for backward, secondary shards included, and what is
        being computed, at the peak.
      secondary_bytes: the secondary shards when all of them are there, of the stage that has most.
        The two fields above count them too, unless they are on the host, or the peak is in the
        update.
      sub_group_bytes: the sub-groups of an offloaded state that are on the device, when they are
        most: `Offload.buffers` of them, and what is computed of one before it goes back. The peak
        has them if it is in the update, and otherwise none. A state on disk has none in a plan.
      peak_in_update: whether the peak is in the update. Then all gradients are there, in float32,
        and neither gathered leaves nor activations.
      offloaded_bytes: the device's state in its host's memory; not counted above.
      disk_bytes: the device's state on its host's disk. The file has room for it twice.
      secondary_on_host: whether secondary shards are in the host's memory.
      outer_bytes: the outer state of an island: outer parameters, the outer optimizer's state, and
        errors that are fed back. It is no part of `state_bytes`, which training steps read.
      outer_on_host: whether the outer state is in the host's memory.
    """

    parameter_bytes: int
    optimizer_bytes: int
    wire_bytes: int
    other_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    activation_bytes: int
    secondary_bytes: int
    sub_group_bytes: int = 0
    peak_in_update: bool = False
    offloaded_bytes: int = 0
    disk_bytes: int = 0
    secondary_on_host: bool = False
    outer_bytes: int = 0
    outer_on_host: bool = False

    @staticmethod
    def of(
        step: Step, state: TrainState, batch: Any, peak: Counter[str], sub_group_bytes: int = 0
    ) -> MemoryPlan:
        """Put a step's figures together.

        Args:
          step: a step that has seen the batch.
          state, batch: the shapes (or arrays) of its state and of a global batch.
          peak: the bytes of temporaries, when they are most while gradients are computed, by the
            kinds that `live/kinds.py` names.
          sub_group_bytes: as the attribute.
        """
        wiring, layout = step.programs.wiring, step.programs.layout(state)
        layouts = step.programs.stage_layouts(layout, state.model_state, batch, state.key)
        gradient_bytes = _gradient_bytes(layout, step)
        in_update = gradient_bytes + sub_group_bytes if sub_group_bytes else 0
        peak_in_update = in_update > peak.total()
        if peak_in_update:
            peak = Counter({GRADIENTS: gradient_bytes})
        secondary = [sum(map(wiring.secondary_bytes, map(_of_part, leaves))) for leaves in layouts]
        others = (state.model_state, state.step, state.loss_scale)
        return MemoryPlan(
            parameter_bytes=shard_bytes(state.params),
            optimizer_bytes=shard_bytes(state.opt_state),
            offloaded_bytes=shard_bytes((state.params, state.opt_state), place="host"),
            disk_bytes=shard_bytes((state.params, state.opt_state), place="disk"),
            wire_bytes=shard_bytes(state.wire_state),
            other_bytes=shard_bytes((others, step.batches.shapes(batch))),
            gathered_bytes=peak[GATHERED],
            gradient_bytes=peak[GRADIENTS],
            activation_bytes=peak[ACTIVATIONS],
            secondary_bytes=max(secondary),
            sub_group_bytes=sub_group_bytes,
            peak_in_update=peak_in_update,
            secondary_on_host=wiring.collectives.gathers.secondary_on_host,
        )

    @property
    def state_bytes(self) -> int:
        """The bytes that the device holds between steps, the batch included."""
        return self.parameter_bytes + self.optimizer_bytes + self.wire_bytes + self.other_bytes

    @property
    def everywhere_bytes(self) -> int:
        """The bytes of `state_bytes` and of the state in the host's memory and on its disk."""
        return self.state_bytes + self.offloaded_bytes + self.disk_bytes

    @property
    def host_bytes(self) -> int:
        """The most bytes that the host's memory holds for this device in a step."""
        secondary_bytes = self.secondary_bytes if self.secondary_on_host else 0
        return self.offloaded_bytes + secondary_bytes + self.outer_bytes - self.outer_device_bytes

    @property
    def outer_device_bytes(self) -> int:
        """The bytes of an island's outer state in the device's own memory."""
        return 0 if self.outer_on_host else self.outer_bytes

    @property
    def temporary_bytes(self) -> int:
        """The bytes that the device holds only within a step, at the peak."""
        in_update = self.sub_group_bytes if self.peak_in_update else 0
        return self.gathered_bytes + self.gradient_bytes + self.activation_bytes + in_update

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.outer_device_bytes + self.temporary_bytes

    def parts(self) -> dict[str, int]:
        """Return the bytes by name; they add up to the total."""
        outer_bytes = self.outer_device_bytes
        outer = {"outer state of the island": outer_bytes} if outer_bytes else {}
        in_update = {SUB_GROUPS: self.sub_group_bytes} if self.peak_in_update else {}
        return {
            "parameters": self.parameter_bytes,
            "optimizer state": self.optimizer_bytes,
            "memory of wires": self.wire_bytes,
            "other state and batch": self.other_bytes,
            **outer,
            GATHERED: self.gathered_bytes,
            GRADIENTS: self.gradient_bytes,
            ACTIVATIONS: self.activation_bytes,
            **in_update,
        }

    def table(self) -> Table:
        """Return the table for a rich console."""
        table = table_of_parts("Memory of one device", self.parts())
        before = "while gradients are computed" if self.peak_in_update else "of these"
        if self.secondary_bytes:
            which = "on the host" if self.secondary_on_host else before
            table.add_row(f"{which}, secondary shards", format_bytes(self.secondary_bytes))
        if self.sub_group_bytes and not self.peak_in_update:
            table.add_row("while it updates, sub-groups", format_bytes(self.sub_group_bytes))
        if self.offloaded_bytes:
            table.add_row("its state in the host's memory", format_bytes(self.offloaded_bytes))
        if self.outer_on_host:
            table.add_row("its outer state in the host's memory", format_bytes(self.outer_bytes))
        if self.disk_bytes:
            table.add_row("its state on the host's disk", format_bytes(self.disk_bytes))
        return table


def _of_part(leaf: Leaf) -> Leaf:
    """Return the part of a leaf that a device computes with, if axes split it."""
    return dataclasses.replace(leaf, placement=leaf.placement.of_part)


def _gradient_bytes(layout: Layout, step: Step) -> int:
    """Return the bytes of a device's shards of all gradients, in float32."""
    shapes = (leaf.placement.shard_shape(step.mesh) for leaf in layout if not leaf.frozen)
    return 4 * sum(map(math.prod, shapes))
