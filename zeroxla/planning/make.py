"""`zeroxla.plan`: what one training step needs and costs, from its trace alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import jax
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import axes_size, leaf_axes
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.axes_plan import AxesPlan
from zeroxla.planning.budget import TracedStep, for_target
from zeroxla.planning.compile_check import compile_step
from zeroxla.planning.fit import zero3_estimate
from zeroxla.planning.generation import Generating, GenerationPlan
from zeroxla.planning.islands import Islands, IslandsPlan
from zeroxla.planning.plan import Plan
from zeroxla.planning.simulation import Simulation
from zeroxla.planning.target import Target
from zeroxla.planning.wire_bytes import comms_of
from zeroxla.step.describe import Description
from zeroxla.step.make import make_step
from zeroxla.step.state import TrainState
from zeroxla.step.step import Step


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
    axis_names: Mapping[str, str | Sequence[str]] | None = None,
    device: str | Device = "h100",
    link: str | Link = "100gbit",
    machines: str | Path | Machines | None = None,
    memory_fraction: float | None = None,
    devices_per_node: int | None = None,
    generating: Generating | None = None,
    islands: Islands | None = None,
    compiled: bool = False,
    ahead: bool | None = None,
) -> Plan:
    """Plan what a training step needs and costs on a cluster, before you have the cluster.

    The step is traced as `make_step` would run it, on a mesh of devices that need not exist. No
    array is made, and nothing is compiled unless you ask for it.

    Args:
      model, optimizer, loss, config, microbatches, weights, axis_names: as `make_step` takes them.
      mesh_shape: lengths of the axes `pipe`, `node`, `device`, and of `expert`, `context` and
        `tensor`, as `make_mesh` makes them; 1 for an axis that is left out.
      batch: the shapes (or arrays) of a global batch.
      device: the cluster's kind of device, by its name in the tables.
      link: the link between nodes, by its name in the tables or by a rate such as "100gbit", which
        the devices of a node share.
      machines: a TOML file with more devices and links.
      memory_fraction: the share of a GPU's memory that JAX takes for a process
        (XLA_PYTHON_CLIENT_MEM_FRACTION). None means the share in the table, 0.75.
      devices_per_node: the number of devices of a node. None means that the axis `device` and those
        after it are a node. Give it for axes that take several nodes, as context=16 on nodes of 8.
      generating: what a `HybridEngine` generates between steps, if anything.
      islands: the number of islands and their links, if `config.outer` says how islands exchange;
        the mesh is one island's. None means two islands with links of 1 Gbit/s.
      compiled: also compile the step ahead of time, for devices that need not be there: for the
        target's GPUs, or, if that cannot be done, by the CPU backend. `Plan.compiled.note` says
        which.
      ahead: whether a loop's turn gathers what the next turn needs. None means as the step's
        program does: on GPUs, unless `prefetch_bucket` is 0. Give it to simulate the program of
        another system.

    Returns:
      The plan.

    Raises:
      ValueError: an unknown device or link, islands without `config.outer`, a batch that does not
        divide, too few CPU devices to compile for, or as `make_step`.

    Cost: one trace, a second or two for a scanned model of any size on any number of devices. With
    `compiled`, also a compilation.

    >>> import jax, zeroxla
    >>> from zeroxla.models import GPT
    >>> tokens = jax.ShapeDtypeStruct((64, 1025), "int32")
    >>> found = zeroxla.plan(GPT.small(), {"node": 4, "device": 8}, {"tokens": tokens})
    >>> found.num_parameters, found.fits
    (124439808, True)
    """
    machines = machines if isinstance(machines, Machines) else Machines.load(machines)
    if islands is not None:
        islands = dataclasses.replace(islands, link=islands.find_link(machines))
    target = Target.find(
        mesh_shape,
        device=device,
        link=link,
        machines=machines,
        memory_fraction=memory_fraction,
        devices_per_node=devices_per_node,
    )
    step_on: Callable[[Any], Step] = partial(
        make_step,
        model,
        optimizer=optimizer,
        loss=loss,
        config=config and for_target(config, target),
        microbatches=microbatches,
        weights=weights,
        axis_names=axis_names,
    )
    step = step_on(cast(Mesh, target.abstract_mesh()))
    found = plan_step(step, batch, target, generating=generating, islands=islands, ahead=ahead)
    if not compiled:
        return found
    return dataclasses.replace(found, compiled=compile_step(step_on, batch, target))


def plan_step(
    step: Step,
    batch: Any,
    target: Target,
    *,
    generating: Generating | None = None,
    islands: Islands | None = None,
    ahead: bool | None = None,
) -> Plan:
    """Plan a step that has been made already; the other arguments as `plan` takes them."""
    state = step.abstract_state(batch)
    traced = TracedStep.of(step, state, batch, target)
    program, memory, platform = traced.traced.program, traced.memory, target.device.platform
    with step.programs.tracing():
        owners = step.programs.describe_owners(state)
    simulation = Simulation.of(
        step, program, traced.traced.local, traced.traced.splits, memory, owners
    )
    time = simulation.on(target, ahead=ahead)
    exchanges = _exchanges(step, state, islands, time.seconds)
    if exchanges is not None:
        memory = exchanges.added_to(memory)
    comms = comms_of(program, dict(target.mesh_shape), platform, target.node_size)
    description = step.describe()
    described = description if isinstance(description, Description) else None
    reports = () if described is None else described.axes
    return Plan(
        target=target,
        num_parameters=sum(math.prod(p.shape) for p in state.placements[0]),
        num_examples=_num_examples(batch),
        num_tokens=_num_tokens(batch),
        memory=memory,
        comms=comms,
        time=time,
        bubble=simulation.bubble,
        deepspeed_bytes=None if described is None else _deepspeed_bytes(described, step),
        generation=None if generating is None else GenerationPlan.of(step, generating),
        axes=AxesPlan.of(target, reports, comms, time) if reports else None,
        rewrites=step.programs.rewrites,
        fit=traced.fit,
        islands=exchanges,
        ahead=ahead,
        simulation=simulation,
    )


def _exchanges(
    step: Step, state: TrainState, islands: Islands | None, step_s: float
) -> IslandsPlan | None:
    """Plan the exchanges between islands; None if the step has none.

    Raises:
      ValueError: there are islands, and the config does not say how they exchange.
    """
    if islands is not None and step.config.outer is None:
        raise ValueError(
            f"there are {islands.num} islands, and the config does not say how they exchange; pass "
            "config=ZeroConfig.diloco(), ZeroConfig.streaming() or ZeroConfig(outer=Outer())"
        )
    return IslandsPlan.of(step, state, islands or Islands(), step_s)


def _num_examples(batch: Any) -> int:
    shapes = [x.shape for x in jax.tree.leaves(batch) if x.shape]
    return shapes[0][0]


def _num_tokens(batch: Any) -> int | None:
    """Return the number of targets in a batch of tokens; None for any other batch."""
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    return None if tokens is None else tokens.shape[0] * (tokens.shape[1] - 1)


def _deepspeed_bytes(described: Description, step: Step) -> float:
    """Return DeepSpeed's estimate of a device's state."""
    num_devices = axes_size(step.mesh, leaf_axes(step.mesh))
    return zero3_estimate(described.largest_unit, described.num_parameters, num_devices)
