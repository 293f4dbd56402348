"""`zeroxla.plan`: what one training step needs and costs, from its trace alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractDevice, AbstractMesh
from rich.table import Table

from zeroxla import compat
from zeroxla.config import ZeroConfig
from zeroxla.inspect.comms import CommsReport
from zeroxla.inspect.memory import format_bytes, render
from zeroxla.make import make_step
from zeroxla.mesh import DEVICE, NODE, PIPE
from zeroxla.planning.liveness import Scope
from zeroxla.planning.machines import Device, Link, Machines
from zeroxla.planning.memory import MemoryPlan, kind_of
from zeroxla.planning.target import Target
from zeroxla.planning.timeline import Clock, TimeLine
from zeroxla.planning.wires import body_of, comms_of
from zeroxla.step import Step
from zeroxla.trace import Program, trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one training step needs and costs on a device of a cluster.

    Attributes:
      target: the devices, links and mesh.
      num_parameters: of the model.
      num_examples, num_tokens: of a step, over all devices; no tokens where a batch has none.
      memory: of one device.
      comms: what travels.
      time: of one step.
      program: what each device runs, without the update.
      prefetches: the step's program gathers a loop's turn ahead, where its compiler can.
    """

    target: Target
    num_parameters: int
    num_examples: int
    num_tokens: int | None
    memory: MemoryPlan
    comms: CommsReport
    time: TimeLine
    program: Program = dataclasses.field(repr=False, compare=False)
    prefetches: bool

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
        time = _time(self.program, target, self.memory, _ahead(target, self.prefetches, ahead))
        return dataclasses.replace(self, target=target, time=time)

    @property
    def fits(self) -> bool:
        """Whether a device's memory holds it."""
        return self.memory.total_bytes <= self.target.device.memory_bytes

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
        table.add_section()
        table.add_row("one step", f"{self.time.seconds:.4g} s", "")
        return table

    def tables(self) -> list[Table]:
        """Return memory, bytes and time, as rich tables."""
        return [self.memory.table(), self.comms.table(), self.time_table()]

    def verdict(self) -> str:
        """Return the plan in a few sentences."""
        device, mesh = self.target.device, self.target.mesh_shape
        axes = " x ".join(f"{name}={size}" for name, size in mesh.items())
        total, room = self.memory.total_bytes, device.memory_bytes
        holds = "fits into" if self.fits else "does NOT fit into"
        unit = "examples" if self.num_tokens is None else "tokens"
        return (
            f"{self.num_parameters:,} parameters on {axes} of {device.label}: a device needs "
            f"{format_bytes(total)} and that {holds} its {format_bytes(room)}. A step takes about "
            f"{self.time.seconds:.3g} s, {self.tokens_per_s:,.0f} {unit}/s, with products at "
            f"{device.efficiency:.0%} of the device's peak ({device.source})."
        )

    def __str__(self) -> str:
        return "\n".join([*map(render, self.tables()), self.verdict()])


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
    ahead: bool | None = None,
) -> Plan:
    """Say what a training step needs and costs on a cluster, before having it.

    The step is traced as `make_step` would run it, on a mesh of devices that need not exist:
    nothing is compiled, and no array is made.

    Args:
      model, optimizer, loss, config, microbatches, weights: as `make_step` takes them.
      mesh_shape: lengths of the axes `pipe`, `node` and `device`; 1 for one that is left out.
      batch: shapes (or arrays) of a global batch.
      device: of the cluster, by its name in the tables.
      link: between nodes, by its name or a rate such as "100gbit", which a node's devices share.
      machines: a TOML file with more devices and links.
      ahead: loops gather in a turn what the next one needs. None: as the step's program does, on
        GPUs unless `prefetch_bucket` is 0. Give it to simulate another system's program.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown device or link, a batch that does not divide, or as `make_step`.

    Cost: one trace: a second or two for a scanned model of any size and any number of devices.

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
    step = make_step(
        model,
        mesh,
        optimizer,
        loss=loss,
        config=config,
        microbatches=microbatches,
        weights=weights,
    )
    return plan_step(step, batch, target, ahead=ahead)


def plan_step(step: Step, batch: Any, target: Target, *, ahead: bool | None = None) -> Plan:
    """Plan a step that there is; as `plan`."""
    state = step.abstract_state(batch)
    program, _ = trace(step.programs.train, state, batch, opened=compat.forward_jaxpr)
    local = _local(program)
    platform = target.device.platform
    peak = Scope.of(local, platform).peak(kind_of)
    prefetches = step.config.prefetch_bucket != 0
    rows = [x.shape for x in jax.tree.leaves(batch) if x.shape]
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    memory = MemoryPlan.of(step, state, batch, peak)
    return Plan(
        target=target,
        num_parameters=sum(math.prod(p.shape) for p in state.placements[0]),
        num_examples=rows[0][0],
        num_tokens=None if tokens is None else tokens.shape[0] * (tokens.shape[1] - 1),
        memory=memory,
        comms=comms_of(program, dict(target.mesh_shape), platform),
        time=_time(local, target, memory, _ahead(target, prefetches, ahead)),
        program=local,
        prefetches=prefetches,
    )


def _ahead(target: Target, prefetches: bool, wanted: bool | None) -> bool:
    """Return whether loops gather a turn ahead; of the compilers only that of GPUs does it."""
    return prefetches and target.device.platform == "gpu" if wanted is None else wanted


def _time(program: Program, target: Target, memory: MemoryPlan, ahead: bool) -> TimeLine:
    """Return the time line of a program and of the update after it."""
    clock = Clock(target, ahead=ahead)
    clock.run(program, [0.0] * len(program.inputs))
    # The update reads and writes the state, and reads the gradients.
    clock.update(target.memory_s(2 * memory.state_bytes + memory.gradient_bytes))
    return clock.timeline()


def _local(program: Program) -> Program:
    """Return what each device runs: gradients, before the update."""
    (mapped,) = (eq for eq in program.equations if eq.name == "shard_map")
    return body_of(mapped.params["jaxpr"])


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
