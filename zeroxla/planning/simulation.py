"""A traced step, ready to be timed on one target after another."""

from __future__ import annotations

import dataclasses

from zeroxla.mesh.axes import BATCH_AXES, PIPE
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.schedule_cost import bubble, work_of
from zeroxla.planning.host_update import HostUpdate
from zeroxla.planning.lanes import COMPUTE, TimeLine
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE, Target
from zeroxla.planning.timeline import Clock, EventNames
from zeroxla.planning.work import Work
from zeroxla.program.live.splits import Splits
from zeroxla.program.trace import Program
from zeroxla.step.owners.owners_report import OwnersReport
from zeroxla.step.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """What one device does in a step.

    Attributes:
      program: the program that each device runs for the gradients.
      update_bytes: bytes of the device's memory that the optimizer's update reads and writes, after
        everything else.
      offloaded_bytes: bytes of state that come from the host's memory for the update and go back.
      disk_bytes: bytes of state that come from the host's disk for the update, by way of the host,
        and go back.
      on_host: the update of the offloaded state, if the host computes it.
      owners: the matrices that one device each computes for the update; None if there are none.
      prefetches: whether loops gather a turn ahead, if the compiler can.
      schedule: a pipeline's schedule.
      forward_again: whether a pipeline's backward runs its stage's forward again.
    """

    program: Program
    update_bytes: int
    offloaded_bytes: int
    disk_bytes: int
    on_host: HostUpdate | None
    owners: OwnersReport | None
    prefetches: bool
    schedule: Schedule | None
    forward_again: bool

    @staticmethod
    def of(
        step: Step,
        program: Program,
        local: Program,
        splits: Splits,
        memory: MemoryPlan,
        owners: OwnersReport | None = None,
    ) -> Simulation:
        """Collect the figures that the simulation of a step needs.

        Args:
          step: the step.
          program: its traced program.
          local: the part of it that each device runs.
          splits: over how many devices each of its values is split.
          memory: its planned memory.
          owners: see `Simulation`.
        """
        update_bytes, on_host = memory.everywhere_bytes, None
        if step.config.offload.update == "host":
            on_host = HostUpdate.of(program, splits)
            update_bytes -= memory.offloaded_bytes
        return Simulation(
            program=local,
            update_bytes=2 * update_bytes + memory.gradient_bytes,
            offloaded_bytes=memory.offloaded_bytes,
            disk_bytes=memory.disk_bytes,
            on_host=on_host,
            owners=owners,
            prefetches=step.config.prefetch_bucket != 0,
            schedule=_schedule(step),
            forward_again=_forward_again(step),
        )

    def on(
        self,
        target: Target,
        *,
        ahead: bool | None = None,
        names: EventNames | None = None,
        as_issued: bool = False,
        with_update: bool = True,
    ) -> TimeLine:
        """Return the time line on a target.

        Args:
          target: a target of the platform for which the step was traced.
          ahead: loops gather a turn ahead. None means as the program does, and of the compilers
            only the GPUs' can.
          names: names the events; None leaves them without.
          as_issued: see `Clock`.
          with_update: whether the optimizer's update follows the gradients.
        """
        if ahead is None:
            ahead = self.prefetches and target.device.platform == "gpu"
        clock = Clock(
            target,
            ahead=ahead,
            full_ticks=self._full_ticks,
            names=names,
            as_issued=as_issued,
        )
        clock.run(self.program, [0.0] * len(self.program.inputs))
        if with_update:
            clock.update(self._update_s(target))
        return clock.timeline()

    @property
    def is_offloaded(self) -> bool:
        """Whether state comes from the host or its disk for the update, or the host updates it."""
        return bool(self.offloaded_bytes or self.disk_bytes or self.on_host)

    @property
    def bubble(self) -> float:
        """The share of a step in which the stages of a pipeline are idle."""
        if self.schedule is None:
            return 0.0
        return bubble(self.schedule, 1, 3 if self.forward_again else 2, 1)

    @property
    def _full_ticks(self) -> float | None:
        """The number of full ticks that take as long as the schedule."""
        if self.schedule is None:
            return None
        return full_ticks(self.schedule, forward_again=self.forward_again)

    def _update_s(self, target: Target) -> dict[str, float]:
        """Return for how long the optimizer's update takes each lane."""
        seconds = {COMPUTE: target.memory_s(self.update_bytes) + self._owners_s(target)}
        moved = 2 * (self.offloaded_bytes + self.disk_bytes)
        if self.on_host is not None:
            moved = self.on_host.moved_bytes
            seconds[HOST_UPDATE] = target.host_update_s(self.on_host.host_bytes)
        if moved:
            seconds[HOST] = target.host_s(moved)
        if self.disk_bytes:
            seconds[DISK] = target.disk_s(self.disk_bytes)
        return seconds

    def _owners_s(self, target: Target) -> float:
        """Return for how long owners compute matrices, and wait for what travels."""
        if self.owners is None or not self.owners.rows:
            return 0.0
        work = Work(flops=self.owners.device_flops, dtype="float32", num_bytes=0.0)
        lengths, num = target.mesh_shape, self.owners.num_devices
        # One exchange over all axes at once: its bytes are shared out by where they come from.
        whole = self.owners.received_bytes * num / (num - 1)
        travel = (target.seconds(a, "all-to-all", whole) for a in BATCH_AXES if lengths[a] > 1)
        return target.products_s(work) + max(travel, default=0.0)


def full_ticks(schedule: Schedule, *, forward_again: bool) -> float:
    """Return the number of full ticks that take as long as a schedule in lockstep.

    In a full tick each conditional of the program takes its longest branch: of all ops, if no rank
    has two in a tick and forwards leave no tapes; else of the forwards, of the backwards and of the
    weight gradients. A backward is twice as long as a forward, and three times if it runs that
    again.
    """
    work = work_of(schedule, 1, 3 if forward_again else 2, 1)  # ticks, ranks, ops
    one_conditional = schedule.one_op and forward_again
    full = work.max() if one_conditional else work.max(axis=(0, 1)).sum()
    return float(work.sum(axis=2).max(axis=1).sum() / full)


def _forward_again(step: Step) -> bool:
    pipeline = step.programs.pipeline
    return isinstance(pipeline, Pipeline) and pipeline.runs_forward_again


def _schedule(step: Step) -> Schedule | None:
    pipeline, stages = step.programs.pipeline, step.mesh.shape.get(PIPE, 1)
    if not isinstance(pipeline, Pipeline):
        return None
    return pipeline.schedule(stages, step.config.num_micro_batches, train=True)
