"""What `zeroxla train` is made of, from its options: mesh, schedule, optimizer, circumstances."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import flax
import jax
import optax
from jax.sharding import Mesh

from zeroxla import data
from zeroxla.hosts.start import has_joined, initialize
from zeroxla.mesh import make_mesh, simulate
from zeroxla.train_options import TrainOptions

NUM_SIMULATED = 8
SIMULATED_NODES = 2


def mesh_for(options: TrainOptions) -> Mesh:
    """Make the mesh of the accelerators, or of simulated devices where there is none."""
    initialize()
    nodes, per_node = options.mesh.nodes, options.mesh.devices_per_node
    if has_joined():
        return make_mesh(nodes=nodes, devices_per_node=per_node)
    simulated_nodes = nodes or SIMULATED_NODES
    simulated_per_node = per_node or max(1, NUM_SIMULATED // simulated_nodes)
    # JAX cannot tell whether there is an accelerator without starting, and must know the number of
    # simulated devices before. Where it has started already, the devices are what they are.
    with contextlib.suppress(RuntimeError):
        simulate(simulated_nodes * simulated_per_node, keep_accelerators=True)
    if jax.default_backend() == "cpu":
        nodes, per_node = simulated_nodes, simulated_per_node
    return make_mesh(nodes=nodes, devices_per_node=per_node)


def schedule_for(options: TrainOptions) -> optax.Schedule:
    """Return the learning rate of step i, counted from 0."""
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
    training = options.training

    def decayed(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: getattr(path[-1], "key", None) in ("kernel", "embedding"), params
        )

    adamw = optax.adamw(schedule, b2=0.95, weight_decay=training.weight_decay, mask=decayed)
    if training.clip == 0:
        return adamw
    return optax.chain(optax.clip_by_global_norm(training.clip), adamw)


def circumstances(corpus: data.Corpus, mesh: Mesh) -> dict[str, Any]:
    """Return what a run depends on besides its options, for config.json."""
    return {
        "text": {
            "source": corpus.source,
            "fingerprint": corpus.fingerprint(),
            "train_bytes": len(corpus.train),
            "valid_bytes": len(corpus.valid),
        },
        "mesh": dict(mesh.shape),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
    }


def check_same(stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Check that a resumed run meets the text that it had; its mesh may be another.

    Raises:
      ValueError: With both, and the remedy.
    """
    if stored["text"] != now["text"]:
        raise ValueError(
            f"the text has changed since the run began: {stored['text']} then, {now['text']} now; "
            "restore it, or start a new run without --resume"
        )
