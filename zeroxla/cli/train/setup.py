"""The mesh, the learning-rate schedule and the optimizer that options ask for."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zeroxla.cli.train.options import TrainOptions
from zeroxla.mesh.axes import world_size
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.mesh.processes.start import has_joined, initialize
from zeroxla.mesh.simulate import simulate

NUM_SIMULATED = 8
SIMULATED_NODES = 2


def mesh_for(options: TrainOptions) -> Mesh:
    """Make the mesh of the accelerators, or of simulated devices if there are none.

    Raises:
      ValueError: the devices do not divide into stages and nodes.
    """
    initialize()
    nodes, per_node = options.mesh.nodes, options.mesh.devices_per_node
    pipe = options.pipeline.pipe
    if has_joined():
        return _mesh(pipe, nodes, per_node)
    simulated_nodes = nodes or (SIMULATED_NODES if pipe * SIMULATED_NODES <= NUM_SIMULATED else 1)
    simulated_per_node = per_node or max(1, NUM_SIMULATED // (pipe * simulated_nodes))
    # JAX must know the number of simulated devices before it starts, and only then can it tell
    # whether there is an accelerator. If it has started already, nothing can be simulated any more.
    with contextlib.suppress(RuntimeError):
        simulate(pipe * simulated_nodes * simulated_per_node, keep_accelerators=True)
    if jax.default_backend() == "cpu":
        nodes, per_node = simulated_nodes, simulated_per_node
    return _mesh(pipe, nodes, per_node)


def _mesh(pipe: int, nodes: int | None, per_node: int | None) -> Mesh:
    there, hosts = len(jax.devices()), nodes or 1
    if per_node is None and pipe > 1 and there % (pipe * hosts):
        raise ValueError(
            f"{there} devices do not divide into --pipe {pipe} stages of --nodes {hosts}; change "
            "one of them, or say --devices-per-node to leave some out"
        )
    return make_mesh(pipe=pipe, nodes=nodes, devices_per_node=per_node)


def microbatches_for(options: TrainOptions, mesh: Mesh) -> int:
    """Return the number of micro-batches of a step.

    A pipeline of p stages is idle for (p - 1) / (m + p - 1) of its time: with m = 2 p a third.
    """
    asked, pipe = options.mesh.accumulate, options.pipeline.pipe
    if asked is not None or pipe == 1:
        return asked or 1
    rows = options.text.batch // world_size(mesh)  # if it does not divide, make_step says so
    return max(m for m in range(1, 2 * pipe + 1) if rows % m == 0)


def schedule_for(options: TrainOptions) -> optax.Schedule:
    """Return a function from the number of a step, counted from 0, to its learning rate."""
    training = options.training
    warmup = round(training.warmup * training.steps)
    return optax.join_schedules(
        [
            # The first step already learns.
            lambda count: training.learning_rate * (count + 1) / (warmup + 1),
            optax.cosine_decay_schedule(
                training.learning_rate, max(1, training.steps - warmup), alpha=0.05
            ),
        ],
        [warmup],
    )


def optimizer_for(options: TrainOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return AdamW with clipping, and with weight decay on matrices only."""
    training = options.training

    def decayed(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: getattr(path[-1], "key", None) in ("kernel", "embedding"), params
        )

    adamw = optax.adamw(schedule, b2=0.95, weight_decay=training.weight_decay, mask=decayed)
    if training.clip == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(training.clip), adamw)
