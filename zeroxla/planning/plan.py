"""`Plan`: the figures of one training step on a cluster, as people look at them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zeroxla.frontend.rewrite.report import RewriteReport
from zeroxla.inspect.comms_report import CommsReport
from zeroxla.mesh.machines import Device, Link
from zeroxla.planning.axes_plan import AxesPlan
from zeroxla.planning.bottleneck import NAMES, Bottleneck, longest, twice_as_fast
from zeroxla.planning.compile_check import CompiledPlan
from zeroxla.planning.generation import GenerationPlan
from zeroxla.planning.islands import IslandsPlan
from zeroxla.planning.lanes import COMPUTE, TimeLine
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.planning.simulation import Simulation
from zeroxla.planning.target import HOST_UPDATE, Target
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.memory.fit_report import MemoryFit

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Report):
    """What one training step needs and costs on a device of a cluster.

    Attributes:
      target: the devices, links and mesh.
      num_parameters: the number of the model's parameters.
      num_examples, num_tokens: the examples and tokens of a step, over all devices. `num_tokens` is
        None if the batch has no tokens.
      memory: the memory of one device.
      comms: the bytes that travel.
      time: the simulated time line of one step.
      bubble: the share of the step in which the stages of a pipeline are idle.
      deepspeed_bytes: DeepSpeed's estimate for the state of a device; None for pipelines.
      generation: the memory of a device that generates, if that was asked for.
      axes: what the axes move and cost that split the work on one row; None if there are none.
      rewrites: what is rewritten in the model's trace; None without the option.
      fit: what is kept, moved and computed again so that the step fits the config's `memory`; None
        without it.
      islands: what the exchanges between islands cost; None if the config has no `outer`. `time`
        is without them.
      compiled: the compiler's figures for memory and collectives, if they were asked for.
      ahead: whether loops gather a turn ahead in `time`; None means as the step's program does.
      simulation: what a device does in the step; `time` follows from it.
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
    axes: AxesPlan | None = None
    rewrites: RewriteReport | None = None
    fit: MemoryFit | None = None
    islands: IslandsPlan | None = None
    compiled: CompiledPlan | None = None
    ahead: bool | None = None
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
          device: another kind of device, of the platform for which the step was traced. None keeps
            this plan's.
          links: other links by mesh axis. Axes that are left out keep their links.
          ahead: as `plan` takes it.

        Raises:
          ValueError: a device of another platform, or links for axes that the target lacks.

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
        islands = self.islands and dataclasses.replace(self.islands, step_s=time.seconds)
        axes = self.axes and AxesPlan.of(target, self.axes.reports, self.comms, time)
        found = dataclasses.replace(self, target=target, time=time, ahead=ahead)
        return dataclasses.replace(found, islands=islands, axes=axes)

    @property
    def fits(self) -> bool:
        """Whether what JAX takes of a device's memory holds the step, and generation if that was
        asked for."""
        return self.most_bytes <= self.target.device.usable_bytes

    @property
    def most_bytes(self) -> int:
        """The most bytes that a device holds, while it trains or generates."""
        generating = 0 if self.generation is None else self.generation.total_bytes
        return max(self.memory.total_bytes, generating + self.memory.outer_device_bytes)

    @property
    def host_bytes(self) -> int:
        """The bytes that a node's own memory holds while a checkpoint is saved: the state of its
        devices, offloaded or not, except for what is on disk."""
        memory = self.memory
        return (memory.state_bytes + memory.host_bytes) * self.target.node_size

    @property
    def limit(self) -> str:
        """The resource that is in use longest, in words, and for which share of the step."""
        resource, seconds = longest(self.time, self.target.shared_links)
        words = f"{NAMES[resource]}, {seconds / self.time.seconds:.0%}"
        return f"{words}; bubble, {self.bubble:.0%}" if self.bubble else words

    @property
    def bottleneck(self) -> Bottleneck:
        """The resource that limits the step, its seconds, and what would change it.

        Cost: the step is simulated once more, a fraction of a second.
        """
        resource, seconds = longest(self.time, self.target.shared_links)
        faster = self.simulation.on(twice_as_fast(self.target, resource), ahead=self.ahead)
        return Bottleneck(
            resource=resource,
            seconds=seconds,
            share=seconds / self.time.seconds,
            faster_s=faster.seconds,
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all devices, or examples if the batch has no tokens."""
        return (self.num_tokens or self.num_examples) / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that the model's own work takes; None without tokens.

        A parameter and a token count 6 operations. Attention and recomputation do not count. The
        peak is the highest one of the device, over all dtypes.

        Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B, without its term of attention.
        """
        if self.num_tokens is None:
            return None
        peak = max(rate for rate in self.target.device.flops_per_s.values())
        devices = math.prod(self.target.mesh_shape.values())
        return 6 * self.num_parameters * self.tokens_per_s / (peak * devices)

    def time_table(self) -> Table:
        """Return the seconds for which each lane is taken, as a rich table."""
        from rich.table import Table

        table = Table(title="Time of one step", title_justify="left")
        for name in ("", "taken for", "share of the step"):
            table.add_column(name, justify="left" if not name else "right")
        for lane, seconds in self.time.busy_s.items():
            link = self.target.links.get(lane)
            computes = "the host updates" if lane == HOST_UPDATE else "the device computes"
            words = f"link of `{lane}`: {link.name}" if link else computes
            table.add_row(words, f"{seconds:.4g} s", f"{seconds / self.time.seconds:.0%}")
            if lane == COMPUTE and self.time.memory_s:
                share = f"{self.time.memory_s / self.time.seconds:.0%}"
                table.add_row("  and waits for its memory", f"{self.time.memory_s:.4g} s", share)
        if self.bubble:
            table.add_row("stages are idle", "", f"{self.bubble:.0%}")
        table.add_section()
        table.add_row("one step", f"{self.time.seconds:.4g} s", "")
        return table

    def tables(self) -> list[Table]:
        """Return memory, bytes, time and the compiler's figures, as rich tables."""
        tables = [self.memory_table()]
        if self.generation is not None:
            tables.append(self.generation.table())
        tables += [self.comms.table(), self.time_table()]
        if self.axes is not None:
            tables.append(self.axes.table())
        if self.rewrites is not None:
            tables.append(self.rewrites.table())
        if self.fit is not None:
            tables.append(self.fit.table())
        if self.islands is not None:
            tables.append(self.islands.table())
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
        total, room = self.most_bytes, f"its {format_bytes(device.memory_bytes)}"
        if device.usable_bytes < device.memory_bytes:
            room = f"the {format_bytes(device.usable_bytes)} that JAX takes of {room}"
        holds = "fits into" if self.fits else "does NOT fit into"
        unit = "examples" if self.num_tokens is None else "tokens"
        rate = f"{self.tokens_per_s:,.0f} {unit}/s"
        if self.mfu is not None:
            each = self.tokens_per_s / math.prod(mesh.values())
            rate += f" ({each:,.0f} a device, {self.mfu:.0%} MFU)"
        sentences = [str(self.bottleneck)]
        if self.islands is not None:
            sentences.append(self.islands.verdict())
        return (
            f"{self.num_parameters:,} parameters on {axes} of {device.label}: a device needs "
            f"{format_bytes(total)} and that {holds} {room}. A step takes about "
            f"{self.time.seconds:.3g} s, {rate}, with products at "
            f"{device.efficiency:.0%} of the device's peak ({device.source}). {' '.join(sentences)}"
        )

    def notes(self) -> list[str]:
        """Return the plan in a few sentences."""
        return [self.verdict(), *(self.fit.notes() if self.fit else ())]
