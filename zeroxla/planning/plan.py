"""`zeroxla.plan`: what one training step needs and costs, from its trace alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from rich.table import Table

from zeroxla import compat
from zeroxla.config import ZeroConfig
from zeroxla.describe import Description
from zeroxla.inspect.comms import CommsReport
from zeroxla.inspect.memory import format_bytes
from zeroxla.inspect.report import Report
from zeroxla.make import make_step
from zeroxla.mesh import DEVICE, NODE, PIPE, world_size
from zeroxla.pipeline.costs import bubble, cost
from zeroxla.pipeline.schedule import Schedule
from zeroxla.planning.compiled import CompiledPlan, compile_step
from zeroxla.planning.fit import zero3_estimate
from zeroxla.planning.generation import Generating, GenerationPlan
from zeroxla.planning.liveness import Scope
from zeroxla.planning.machines import Device, Link, Machines
from zeroxla.planning.memory import MemoryPlan, kind_of
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import COMPUTE, Clock, TimeLine
from zeroxla.planning.wires import comms_of, local_of
from zeroxla.step import Step
from zeroxla.trace import trace


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
        """What a node's own memory holds while a checkpoint is saved: its devices' state."""
        mesh = self.target.mesh_shape
        return self.memory.state_bytes * math.prod(n for a, n in mesh.items() if a == DEVICE)

    @property
    def limit(self) -> str:
        """What the step waits for most: the lane that is taken longest, and for which share."""
        lane, seconds = max(self.time.busy_s.items(), key=lambda item: item[1])
        name = "computation" if lane == COMPUTE else f"the link of `{lane}`"
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
            words = f"link of `{lane}`: {link.name}" if link else "the device computes"
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


def plan(
    model: Any,
    mesh_shape: Mapping[str, int],
    batch: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    loss: Any = None,
    config: ZeroConfig | None = None,
    microbatches: int | None = None,
    weights: Literal["step", "tick"] = "step",
    device: str | Device = "h100",
    link: str | Link = "100gbit",
    machines: str | Path | Machines | None = None,
    generating: Generating | None = None,
    compiled: bool = False,
) -> Plan:
    """Say what a training step needs and costs on a cluster, before having it.

    The step is traced as `make_step` would run it, on a mesh of devices that need not exist:
    unless it is asked for nothing is compiled, and no array is made.

    Args:
      model, optimizer, loss, config, microbatches, weights: as `make_step` takes them.
      mesh_shape: lengths of the axes `pipe`, `node` and `device`; 1 for one that is left out.
      batch: shapes (or arrays) of a global batch.
      device: of the cluster, by its name in the tables.
      link: between nodes, by its name or a rate such as "100gbit", which a node's devices share.
      machines: a TOML file with more devices and links.
      generating: what a `HybridEngine` is to generate between steps, if anything.
      compiled: compile the step, too, ahead of time for devices that need not be there: for the
        target's GPUs, or by the CPU backend where that cannot be, which `Plan.compiled.note` says.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown device or link, a batch that does not divide, too few CPU devices to
        compile for, or as `make_step`.

    Cost: one trace: a second or two for a scanned model of any size and any number of devices; with
    `compiled` also a compilation.

    >>> import jax, zeroxla
    >>> from models import GPT
    >>> tokens = jax.ShapeDtypeStruct((64, 1025), "int32")
    >>> found = zeroxla.plan(GPT.small(), {"node": 4, "device": 8}, {"tokens": tokens})
    >>> found.num_parameters, found.fits
    (124439808, True)
    """
    if not isinstance(machines, Machines):
        machines = Machines.load(machines)
    device = machines.find_device(device) if isinstance(device, str) else device
    between = machines.find_link(link) if isinstance(link, str) else link
    shape = _checked(mesh_shape)
    inside = machines.find_link(device.link)
    target = Target(
        device=device,
        links={DEVICE: inside, NODE: between, PIPE: between},
        mesh_shape=shape,
    )
    abstract = AbstractDevice(device.label, None, device.platform)
    mesh: Any = AbstractMesh(tuple(shape.values()), tuple(shape), abstract_device=abstract)

    def step_on(mesh: Mesh) -> Step:
        return make_step(
            model,
            mesh,
            optimizer,
            loss=loss,
            config=config,
            microbatches=microbatches,
            weights=weights,
        )

    found = plan_step(step_on(mesh), batch, target, generating=generating)
    if not compiled:
        return found
    return dataclasses.replace(found, compiled=compile_step(step_on, batch, device, shape))


def plan_step(
    step: Step, batch: Any, target: Target, *, generating: Generating | None = None
) -> Plan:
    """Plan a step that there is; as `plan`."""
    state = step.abstract_state(batch)
    program, _ = trace(step.programs.train, state, batch, opened=compat.forward_jaxpr)
    local = local_of(program)
    platform = target.device.platform
    peak = Scope.of(local, platform).peak(kind_of)
    prefetches = step.config.prefetch_bucket != 0
    schedule = _schedule(step)
    clock = Clock(
        target,
        ahead=prefetches and platform == "gpu",
        full_ticks=None if schedule is None else cost(schedule, 1, 2) / 3,
    )
    clock.run(local, [0.0] * len(local.inputs))
    rows = [x.shape for x in jax.tree.leaves(batch) if x.shape]
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    memory = MemoryPlan.of(step, state, batch, peak)
    # The update reads and writes the state, and reads the gradients.
    clock.update((2 * memory.state_bytes + memory.gradient_bytes) / target.device.bytes_per_s)
    return Plan(
        target=target,
        num_parameters=sum(math.prod(p.shape) for p in state.placements[0]),
        num_examples=rows[0][0],
        num_tokens=None if tokens is None else tokens.shape[0] * (tokens.shape[1] - 1),
        memory=memory,
        comms=comms_of(program, dict(target.mesh_shape), platform),
        time=clock.timeline(),
        bubble=0.0 if schedule is None else bubble(schedule),
        deepspeed_bytes=_deepspeed_bytes(step),
        generation=None if generating is None else GenerationPlan.of(step, generating),
    )


def _schedule(step: Step) -> Schedule | None:
    pipeline, stages = step.programs.pipeline, step.mesh.shape.get(PIPE, 1)
    if pipeline is None:
        return None
    return pipeline.schedule(stages, step.config.accumulate, train=True)


def _deepspeed_bytes(step: Step) -> float | None:
    described = step.describe()
    if not isinstance(described, Description):
        return None
    return zero3_estimate(described.largest_unit, described.num_parameters, world_size(step.mesh))


def _checked(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of a mesh, outermost first.

    Raises:
      ValueError: unknown axes, or lengths below 1.
    """
    known = (PIPE, NODE, DEVICE)
    if unknown := set(mesh_shape) - set(known):
        raise ValueError(f"the mesh has the axes {sorted(unknown)}; there are {known}")
    shape = {axis: mesh_shape.get(axis, 1) for axis in known}
    for axis, length in shape.items():
        if length < 1 or length != int(length):
            raise ValueError(f"the mesh has {axis}={length}; give a whole number, 1 or more")
    if shape[PIPE] == 1:
        del shape[PIPE]
    return shape
