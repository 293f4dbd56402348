"""A traced step, to be timed on one target after another."""

from __future__ import annotations

import dataclasses

from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.schedule_cost import cost
from zeroxla.planning.host_update import HostUpdate
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE, Target
from zeroxla.planning.timeline import COMPUTE, Clock, TimeLine
from zeroxla.program.trace import Program


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What one device does in a step.

    Attributes:
      program: the gradients' part of it.
      update_bytes: that the optimizer's update reads and writes on the device, after everything
        else.
      offloaded_bytes: that come from the host for it and go back.
      disk_bytes: that come from the host's disk for it, by way of the host, and go back.
      on_host: the update of what is offloaded, where the host computes it.
      prefetches: loops gather a turn ahead, where the compiler can.
      schedule: of a pipeline.
    """

    program: Program
    update_bytes: int
    offloaded_bytes: int
    disk_bytes: int
    on_host: HostUpdate | None
    prefetches: bool
    schedule: Schedule | None

    def on(self, target: Target, *, ahead: bool | None = None) -> TimeLine:
        """Return the time line on a target.

        Args:
          target: of the platform for which the step was traced.
          ahead: loops gather a turn ahead. None: as the program does; of the compilers only that of
            GPUs does.
        """
        if ahead is None:
            ahead = self.prefetches and target.device.platform == "gpu"
        clock = Clock(target, ahead=ahead, full_ticks=self._full_ticks)
        clock.run(self.program, [0.0] * len(self.program.inputs))
        update = {COMPUTE: target.memory_s(self.update_bytes)}
        moved = 2 * (self.offloaded_bytes + self.disk_bytes)
        if self.on_host is not None:
            moved = self.on_host.moved_bytes
            update[HOST_UPDATE] = target.host_update_s(self.on_host.host_bytes)
        if moved:
            update[HOST] = target.host_s(moved)
        if self.disk_bytes:
            update[DISK] = target.disk_s(self.disk_bytes)
        clock.update(update)
        return clock.timeline()

    @property
    def _full_ticks(self) -> float | None:
        return None if self.schedule is None else cost(self.schedule, 1, 2) / 3
