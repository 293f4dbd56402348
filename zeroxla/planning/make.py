"""`zeroxla.plan`: what one training step needs and costs, from its trace alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE, PIPE, world_size
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.offload.disk.desk import with_tickets
from zeroxla.offload.disk.disk_array import DiskShape
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.pipeline.schedule import Schedule
from zeroxla.pipeline.schedule_cost import bubble
from zeroxla.planning.compile_check import compile_step
from zeroxla.planning.fit import zero3_estimate
from zeroxla.planning.generation import Generating, GenerationPlan
from zeroxla.planning.host_update import HostUpdate
from zeroxla.planning.liveness import Scope
from zeroxla.planning.memory_model import MemoryPlan, kind_of
from zeroxla.planning.plan import Plan
from zeroxla.planning.simulation import Simulation
from zeroxla.planning.target import DISK, HOST, Target
from zeroxla.planning.wire_bytes import comms_of, local_of
from zeroxla.program import compat
from zeroxla.program.trace import Program, trace
from zeroxla.step.describe import Description
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step

DISK_LINK = "nvme4"
"""Of a host, unless `Plan.on` is given another."""


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
    ahead: bool | None = None,
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
      ahead: loops gather in a turn what the next one needs. None: as the step's program does, on
        GPUs unless `prefetch_bucket` is 0. Give it to simulate another system's program.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown device or link, a batch that does not divide, too few CPU devices to
        compile for, or as `make_step`.

    Cost: one trace: a second or two for a scanned model of any size and any number of devices; with
    `compiled` also a compilation.

    >>> import jax, zeroxla
    >>> from zeroxla.models import GPT
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
    inside, to_host = machines.find_link(device.link), machines.find_link(device.host_link)
    to_disk = machines.find_link(DISK_LINK)
    target = Target(
        device=device,
        links={DEVICE: inside, NODE: between, PIPE: between, HOST: to_host, DISK: to_disk},
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

    found = plan_step(step_on(mesh), batch, target, generating=generating, ahead=ahead)
    if not compiled:
        return found
    return dataclasses.replace(found, compiled=compile_step(step_on, batch, device, shape))


def plan_step(
    step: Step,
    batch: Any,
    target: Target,
    *,
    generating: Generating | None = None,
    ahead: bool | None = None,
) -> Plan:
    """Plan a step that there is; as `plan`."""
    state = step.abstract_state(batch)
    program = _traced(step, state, batch)
    local, platform = local_of(program), target.device.platform
    memory = MemoryPlan.of(step, state, batch, Scope.of(local, platform).peak(kind_of))
    schedule = _schedule(step)
    update_bytes, on_host = memory.everywhere_bytes, None
    if step.config.offload.update == "host":
        on_host = HostUpdate.of(program, step.mesh.size)
        update_bytes -= memory.offloaded_bytes
    simulation = Simulation(
        program=local,
        update_bytes=2 * update_bytes + memory.gradient_bytes,
        offloaded_bytes=memory.offloaded_bytes,
        disk_bytes=memory.disk_bytes,
        on_host=on_host,
        prefetches=step.config.prefetch_bucket != 0,
        schedule=schedule,
    )
    rows = [x.shape for x in jax.tree.leaves(batch) if x.shape]
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return Plan(
        target=target,
        num_parameters=sum(math.prod(p.shape) for p in state.placements[0]),
        num_examples=rows[0][0],
        num_tokens=None if tokens is None else tokens.shape[0] * (tokens.shape[1] - 1),
        memory=memory,
        comms=comms_of(program, dict(target.mesh_shape), platform),
        time=simulation.on(target, ahead=ahead),
        bubble=0.0 if schedule is None else bubble(schedule),
        deepspeed_bytes=_deepspeed_bytes(step),
        generation=None if generating is None else GenerationPlan.of(step, generating),
        simulation=simulation,
    )


def _schedule(step: Step) -> Schedule | None:
    pipeline, stages = step.programs.pipeline, step.mesh.shape.get(PIPE, 1)
    if not isinstance(pipeline, Pipeline):
        return None
    return pipeline.schedule(stages, step.config.accumulate, train=True)


def _traced(step: Step, state: TrainState, batch: Any) -> Program:
    """Return the program of a step; where parameters are on disk that of the gradients, which reads
    them."""
    fun: Callable[..., Any] = step.programs.train
    leaves, tree = jax.tree.flatten(state.params)
    if any(isinstance(x, DiskShape) for x in leaves):
        tickets = with_tickets(leaves, state.placements[0])
        fun, state = step.programs.begin, dataclasses.replace(state, params=tree.unflatten(tickets))
    return trace(fun, state, batch, opened=compat.forward_jaxpr)[0]


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
