"""What one training step needs and costs on a cluster: the figures, as people look at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rich.table import Table

from zeroxla.inspect.comms import CommsReport
from zeroxla.mesh.axes import DEVICE
from zeroxla.mesh.machines import Device, Link
from zeroxla.planning.compile_check import CompiledPlan
from zeroxla.planning.generation import GenerationPlan
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.planning.simulation import Simulation
from zeroxla.planning.target import HOST_UPDATE, Target
from zeroxla.planning.timeline import COMPUTE, TimeLine
from zeroxla.program.report import Report, format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Report):
    """What one training step needs and costs on a device of a cluster.

    Attributes:
      target: the devices, links and mesh.
      num_parameters: of the model.
      num_examples, num_tokens: of a step, over all devices; no tokens where a batch has none.
      memory: of one device.
      comms: what travels.
      time: of one step.
      bubble: the share of it that stages of a pipeline are idle in.
      deepspeed_bytes: what DeepSpeed's estimate says of the state; None for pipelines.
      generation: memory of a device that generates, where that was asked for.
      compiled: what the compiler says of memory and collectives, if it was asked.
      simulation: what `time` was found from.
    """

    target: Target
    num_parameters: int
    num_examples: int
    num_tokens: int | None
    memory: MemoryPlan
    comms: CommsReport
    time: TimeLine
    bubble: float = 0.0
    deepspeed_bytes: float | None = None
    generation: GenerationPlan | None = None
    compiled: CompiledPlan | None = None
    simulation: Simulation = dataclasses.field(repr=False, compare=False)

    def on(
        self,
        *,
        device: Device | None = None,
        links: Mapping[str, Link] | None = None,
        ahead: bool | None = None,
    ) -> Plan:
        """Return the plan of the same step on other devices or links, without tracing it again.

        Args:
          device: instead of this plan's; of the same platform, for which the step was traced.
          links: by mesh axis, instead of this plan's; axes that are left out keep theirs.
          ahead: as `plan` takes it.

        Raises:
          ValueError: a device of another platform, or links of axes that the target lacks.

        Cost: a fraction of a second.
        """
        target = self.target
        device = device or target.device
        if device.platform != target.device.platform:
            raise ValueError(
                f"the step was traced for {target.device.platform} and {device.name!r} is a "
                f"{device.platform}; make a plan for it"
            )
        if unknown := set(links or {}) - set(target.links):
            raise ValueError(f"there are no links of {sorted(unknown)}; of {sorted(target.links)}")
        links = {**target.links, **(links or {})}
        target = dataclasses.replace(target, device=device, links=links)
        time = self.simulation.on(target, ahead=ahead)
        return dataclasses.replace(self, target=target, time=time)

    @property
    def fits(self) -> bool:
        """Whether a device's memory holds it, and generating where that was asked for."""
        return self.most_bytes <= self.target.device.memory_bytes

    @property
    def most_bytes(self) -> int:
        """The most that a device holds."""
        generating = 0 if self.generation is None else self.generation.total_bytes
        return max(self.memory.total_bytes, generating)

    @property
    def host_bytes(self) -> int:
        """What a node's own memory holds while a checkpoint is saved: its devices' state, offloaded
        or not, but for what is on its disk."""
        mesh, memory = self.target.mesh_shape, self.memory
        return (memory.state_bytes + memory.host_bytes) * mesh[DEVICE]

    @property
    def limit(self) -> str:
        """What the step waits for most: the lane that is taken longest, and for which share."""
        lane, seconds = max(self.time.busy_s.items(), key=lambda item: item[1])
        known = {COMPUTE: "computation", HOST_UPDATE: "the host's update"}
        name = known.get(lane, f"the link of `{lane}`")
        words = f"{name}, {seconds / self.time.seconds:.0%}"
        return f"{words}; bubble, {self.bubble:.0%}" if self.bubble else words

    @property
    def tokens_per_s(self) -> float:
        """Tokens, or where there are none examples, per second over all devices."""
        return (self.num_tokens or self.num_examples) / self.time.seconds

    def time_table(self) -> Table:
        """Return seconds by lane, as a rich table."""
        table = Table(title="Time of one step", title_justify="left")
        for name in ("", "taken for", "share of the step"):
            table.add_column(name, justify="left" if not name else "right")
        for lane, seconds in self.time.busy_s.items():
            link = self.target.links.get(lane)
            computes = "the host updates" if lane == HOST_UPDATE else "the device computes"
            words = f"link of `{lane}`: {link.name}" if link else computes
            table.add_row(words, f"{seconds:.4g} s", f"{seconds / self.time.seconds:.0%}")
        if self.bubble:
            table.add_row("stages are idle", "", f"{self.bubble:.0%}")
        table.add_section()
        table.add_row("one step", f"{self.time.seconds:.4g} s", "")
        return table

    def tables(self) -> list[Table]:
        """Return memory, bytes, time and what the compiler says, as rich tables."""
        tables = [self.memory_table()]
        if self.generation is not None:
            tables.append(self.generation.table())
        tables += [self.comms.table(), self.time_table()]
        if self.compiled is not None:
            tables += [*self.compiled.tables(), self.compiled.beside(self.memory, self.comms)]
        return tables

    def memory_table(self) -> Table:
        """Return the memory of a device and of its host, as a rich table."""
        table = self.memory.table()
        if self.deepspeed_bytes is not None:
            words = "DeepSpeed's estimate, activations apart"
            table.add_row(words, format_bytes(self.deepspeed_bytes))
        table.add_row("a host, while it saves a checkpoint", format_bytes(self.host_bytes))
        return table

    def verdict(self) -> str:
        """Return the plan in a few sentences."""
        device, mesh = self.target.device, self.target.mesh_shape
        axes = " x ".join(f"{name}={size}" for name, size in mesh.items())
        total, room = self.most_bytes, device.memory_bytes
        holds = "fits into" if self.fits else "does NOT fit into"
        unit = "examples" if self.num_tokens is None else "tokens"
        return (
            f"{self.num_parameters:,} parameters on {axes} of {device.label}: a device needs "
            f"{format_bytes(total)} and that {holds} its {format_bytes(room)}. A step takes about "
            f"{self.time.seconds:.3g} s, {self.tokens_per_s:,.0f} {unit}/s, with products at "
            f"{device.efficiency:.0%} of the device's peak ({device.source})."
        )

    def notes(self) -> list[str]:
        """Return the plan in a few sentences."""
        return [self.verdict()]
