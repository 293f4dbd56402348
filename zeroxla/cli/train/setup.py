"""The mesh, the config, the learning-rate schedule and the optimizer that options ask for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from zeroxla.cli.deepspeed_file import filled, kept_deepspeed, says_optimizer
from zeroxla.cli.mesh_options import AxesOptions, MeshOptions
from zeroxla.cli.train.chosen import with_rates
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.zero_options import zero_config
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE, world_size
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.mesh.processes.environment import SIMULATED_DEVICES
from zeroxla.mesh.processes.start import has_joined, initialize
from zeroxla.mesh.simulate import simulate

NUM_SIMULATED = 8
SIMULATED_NODES = 2
BETA2 = 0.95
"""The default of adamw's beta2."""


def mesh_for(options: TrainOptions) -> Mesh:
    """Make the mesh of the accelerators, or of simulated devices if there are none.

    Raises:
      ValueError: the devices do not divide into stages and nodes.
    """
    return mesh_of(options.mesh, options.axes, pipe=options.pipeline.pipe)


def mesh_of(
    mesh: MeshOptions,
    axes: AxesOptions,
    *,
    pipe: int = 1,
    devices: int = NUM_SIMULATED,
    nodes_of_them: int = SIMULATED_NODES,
) -> Mesh:
    """Make the mesh that options ask for; see `mesh_for`.

    Args:
      mesh: the lengths of `node` and `device`.
      axes: the axes that split the work on one row.
      pipe: the number of ranks of a pipeline.
      devices, nodes_of_them: the number of devices that are simulated, and of their nodes, if the
        options do not say it.

    Raises:
      ValueError: the devices do not divide into stages and nodes.
    """
    initialize()
    nodes, per_node = mesh.nodes, mesh.devices_per_node
    if has_joined():
        return _mesh(pipe, nodes, per_node, axes)
    simulated_nodes, simulated_per_node = _simulated(
        pipe, nodes, per_node, devices=devices, nodes_of_them=nodes_of_them
    )
    # JAX must know the number of simulated devices before it starts, and only then can it tell
    # whether there is an accelerator. If it has started already, nothing can be simulated any more.
    with contextlib.suppress(RuntimeError):
        simulate(pipe * simulated_nodes * simulated_per_node, keep_accelerators=True)
    if jax.default_backend() == "cpu":
        nodes, per_node = simulated_nodes, simulated_per_node
    return _mesh(pipe, nodes, per_node, axes)


def _simulated(
    pipe: int, nodes: int | None, per_node: int | None, *, devices: int, nodes_of_them: int
) -> tuple[int, int]:
    """Return the nodes and the devices of a node that are simulated; of those that a launcher has
    given this process, if it has a share of the machine."""
    given = os.environ.get(SIMULATED_DEVICES)
    there = int(given) if given else devices
    least = pipe * nodes_of_them * ((per_node or 1) if given else 1)
    nodes = nodes or (nodes_of_them if least <= there else 1)
    return nodes, per_node or max(1, there // (pipe * nodes))


def _mesh(pipe: int, nodes: int | None, per_node: int | None, axes: AxesOptions) -> Mesh:
    there, hosts = len(jax.devices()), nodes or 1
    if per_node is None and pipe > 1 and there % (pipe * hosts):
        raise ValueError(
            f"{there} devices do not divide into --pipe {pipe} stages of --nodes {hosts}; change "
            "one of them, or say --devices-per-node to leave some out"
        )
    return make_mesh(
        pipe=pipe,
        nodes=nodes,
        devices_per_node=per_node,
        tensor=axes.tensor,
        context=axes.context,
        expert=axes.expert,
    )


def config_for(options: TrainOptions, mesh: Mesh, run: Path | None = None) -> ZeroConfig:
    """Return the config of a run.

    Args:
      options: the run's options.
      mesh: the run's mesh.
      run: the run's folder, if there is one already, with its copy of the file of --deepspeed.

    Raises:
      ValueError: an option or the file cannot work.
    """
    check_batch(options, mesh)
    deepspeed = deepspeed_of(options, run)
    config = zero_config(options, {}, deepspeed=deepspeed, outer=options.outer)
    if deepspeed is not None and not says_optimizer(deepspeed):
        config = dataclasses.replace(config, optimizer=None)  # it clips, which `settled` has taken
    return dataclasses.replace(config, accumulate=microbatches_for(options, config, mesh))


def deepspeed_of(options: TrainOptions, run: Path | None) -> Path | dict[str, Any] | None:
    """Return a run's DeepSpeed configuration, in a new run with values in the place of "auto"."""
    file = kept_deepspeed(options.zero, run)
    if file is None or run is not None:
        return file
    return filled(file, with_rates(options).training, options.zero.compute_dtype)


def check_batch(options: TrainOptions, mesh: Mesh) -> None:
    """Check that the rows of a batch divide over the devices.

    Raises:
      ValueError: they do not.
    """
    devices = world_size(mesh)
    if options.text.batch % devices:
        axes = ", ".join(f"{name}={mesh.shape[name]}" for name in (NODE, DEVICE))
        raise ValueError(
            f"--batch {options.text.batch} does not divide over {devices} devices ({axes}); use a "
            f"multiple of {devices}"
        )


def microbatches_for(
    options: TrainOptions, config: ZeroConfig, mesh: Mesh
) -> int | Literal["auto"]:
    """Return the number of micro-batches of a step.

    A pipeline of p stages is idle for (p - 1) / (m + p - 1) of its time: with m = 2 p a third.
    """
    pipe = options.pipeline.pipe
    if options.zero.accumulate is not None or config.accumulate != 1 or pipe == 1:
        return config.accumulate
    rows = options.text.batch // world_size(mesh)  # if it does not divide, make_step says so
    return max(m for m in range(1, 2 * pipe + 1) if rows % m == 0)


def schedule_for(options: TrainOptions) -> optax.Schedule:
    """Return a function from the number of a step, counted from 0, to its learning rate. What the
    options leave open is usual."""
    training: Any = with_rates(options).training
    rate, steps = training.learning_rate, training.steps
    warmup = round(training.warmup * steps)
    return optax.join_schedules(
        [
            # The first step already learns.
            lambda count: rate * (count + 1) / (warmup + 1),
            optax.cosine_decay_schedule(rate, max(1, steps - warmup), alpha=training.min_rate),
        ],
        [warmup],
    )


def takes_file_optimizer(options: TrainOptions, config: ZeroConfig) -> bool:
    """Return whether the optimizer is the one of the file of --deepspeed."""
    return config.optimizer is not None and options.training.optimizer is None


def optimizer_for(options: TrainOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the optimizer that the options name, with clipping and weight decay on matrices."""
    return with_rates(options).training.make(schedule, beta2=BETA2)
