"""The job of `zeroxla explain`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console

from zeroxla.cli.data.row_files import are_rows
from zeroxla.cli.data.sources import with_weight
from zeroxla.cli.explain.options import ExplainOptions
from zeroxla.cli.run_folder import read_config
from zeroxla.cli.run_sections import stored_options
from zeroxla.cli.train.images import alexnet_pipeline
from zeroxla.cli.train.model import choose
from zeroxla.cli.train.options import TrainOptions
from zeroxla.cli.train.preferences import PreferencesTask, settings_of
from zeroxla.cli.train.setup import config_for, optimizer_for, schedule_for, takes_file_optimizer
from zeroxla.mesh.axes import CONTEXT, DEVICE, EXPERT, NODE, PIPE, TENSOR, lengths_beside
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.planning.compile_check import prepare_cpu
from zeroxla.planning.explain.make import explain
from zeroxla.planning.explain.report import Explanation
from zeroxla.planning.target import Target
from zeroxla.rlhf.dpo_objective import pair_shapes, preference_loss
from zeroxla.step.make import make_step

NODES, DEVICES_PER_NODE = 2, 4


def run_explain(options: ExplainOptions) -> int:
    """Print the report on a run's step.

    Returns:
      The exit status: 1 if there is a stall, and 0 if not.

    Raises:
      ValueError: the folder holds no run of `zeroxla train`, or as `zeroxla.explain`.
    """
    console = Console(highlight=False)
    found = explained(options)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console.print(found.headline, markup=False)
        for table in found.tables():
            console.print(table)
        for note in found.notes():
            console.print(note, markup=False)
    if options.picture is not None:
        try:
            options.picture.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--picture {options.picture}: cannot make its folder: {error.strerror}"
            ) from error
        found.plot(path=options.picture)
        print(f"Picture: {options.picture}", file=sys.stderr)
    return 1 if found.stalls else 0


def explained(options: ExplainOptions) -> Explanation:
    """Return the report on a run's step.

    Raises:
      ValueError: as `run_explain`.
    """
    run = options.run.expanduser()
    found = read_config(run)
    command = found.get("command")
    if command != "train":
        raise ValueError(
            f"{run} is a run of zeroxla {command}, and zeroxla explain explains runs of zeroxla "
            "train; call zeroxla.explain(step) with the step of your own program"
        )
    stored = stored_options(TrainOptions, run)
    if options.batch is not None:
        text = dataclasses.replace(stored.text, batch=options.batch)
        stored = dataclasses.replace(stored, text=text)
    shape = _mesh_shape(options, stored)
    per_node = shape[DEVICE] * shape[EXPERT] * shape[CONTEXT] * shape[TENSOR]
    if options.compile:
        prepare_cpu(shape[PIPE] * shape[NODE] * per_node)
    machines = {"machines": options.machines, "device": options.device, "link": options.link}
    target = Target.find(shape, **machines)
    mesh = cast(Mesh, target.abstract_mesh())
    config = config_for(stored, mesh, run)
    optimizer = config.optimizer
    if not takes_file_optimizer(stored, config):
        optimizer = optimizer_for(stored, schedule_for(stored))
        config = dataclasses.replace(config, optimizer=None)
    model, batch = _model_and_batch(stored, options)
    loss = None
    if PreferencesTask.data in found:
        settings = settings_of(stored)
        loss, batch = preference_loss(settings), pair_shapes(settings)
    weights = stored.pipeline.weights
    step = make_step(model, mesh, optimizer, loss=loss, config=config, weights=weights)
    return explain(
        step, batch, **machines, compiled=options.compile, least_share=options.least_share
    )


def _mesh_shape(options: ExplainOptions, stored: TrainOptions) -> dict[str, int]:
    nodes = options.nodes or stored.mesh.nodes or NODES
    per_node = options.devices_per_node or stored.mesh.devices_per_node or DEVICES_PER_NODE
    axes = stored.axes
    split = {EXPERT: axes.expert, CONTEXT: axes.context, TENSOR: axes.tensor}
    nodes, data = lengths_beside(nodes, per_node, split)
    return {PIPE: stored.pipeline.pipe, NODE: nodes, DEVICE: data, **split}


def _model_and_batch(stored: TrainOptions, options: ExplainOptions) -> tuple[Any, dict[str, Any]]:
    """Return a run's model, as `make_step` takes it, and the shapes of its batches."""
    rows, stages = stored.text.batch, stored.pipeline
    if stored.model.model == "alexnet":
        size = stored.images.image_size
        image = jax.ShapeDtypeStruct((rows, size, size, 3), jnp.float32)
        return alexnet_pipeline(stored), {
            "image": image,
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
    run = options.run.expanduser()
    model = stored.lora.adapted(choose(stored, run).model, run)
    if stages.pipe > 1:
        model = Pipeline.from_model(model, **stages.as_arguments)
    length = stored.text.tokens
    batch = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)}
    if are_rows(with_weight(name)[0] for name in stored.text.data):
        batch["mask"] = jax.ShapeDtypeStruct((rows, length), jnp.int8)
        if stored.rows.packing:
            own = jax.ShapeDtypeStruct((rows, length), jnp.int32)
            batch |= {"segments": own, "positions": own}
    return model, batch
