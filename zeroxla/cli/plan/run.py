"""The job of `zeroxla plan`."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zeroxla.cli.plan.options import PlanOptions
from zeroxla.cli.zero_options import zero_config
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.inspect.pictures import plot_plan, plot_search
from zeroxla.mesh.axes import CONTEXT, DEVICE, EXPERT, NODE, PIPE, TENSOR, lengths_beside
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.planning.calibrate import calibrated, entry
from zeroxla.planning.compile_check import prepare_cpu
from zeroxla.planning.fit import smallest
from zeroxla.planning.generation import Generating
from zeroxla.planning.make import plan
from zeroxla.planning.model_presets import model_named
from zeroxla.planning.plan import Plan
from zeroxla.planning.search import Search, search_plans

ROWS_PER_DEVICE = 8  # with --search, so that there are micro-batches to choose


def run_plan(options: PlanOptions) -> int:
    """Print a plan or the result of a search, and draw it if the options ask for a picture.

    Returns:
      The exit status: 0 if the memory of a device holds the step, and 1 if not.

    Raises:
      ValueError: as `zeroxla.plan` and `calibrated`.
    """
    _make_folder(options.output.picture)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if options.output.search:
        return _run_search(options, console)
    with console.status(f"tracing{' and compiling' * options.compilation.compile} the step"):
        found = plan_from(options)
        if options.cluster.measured_s is not None:
            found = _calibrated(found, options.cluster.measured_s)
    for table in found.tables():
        console.print(table)
    for note in found.notes():
        console.print(note, markup=False, soft_wrap=True)
    if options.cluster.measured_s is not None:
        console.print("The device, for a file of --machines:")
        console.print(entry(found.target.device), markup=False, soft_wrap=True)
    if not found.fits:
        with console.status("looking for the smallest cluster that would hold it"):
            words = _smallest_cluster(options, found)
        console.print(words, markup=False, soft_wrap=True)
    if options.output.picture is not None:
        plot_plan(found, path=options.output.picture)
        console.print(f"Picture: {options.output.picture}", markup=False, soft_wrap=True)
    return 0 if found.fits else 1


def _make_folder(picture: Path | None) -> None:
    """Make the folder of a picture before the planning, which may take minutes.

    Raises:
      ValueError: it cannot be made.
    """
    if picture is None:
        return
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--picture {picture}: cannot make the folder {picture.parent}: {error.strerror}"
        ) from error


_NOWHERE = Path("planned")
"""The folder of a planned state on disk. It is never made."""


def plan_from(options: PlanOptions) -> Plan:
    """Make the plan that options ask for.

    Raises:
      ValueError: as `zeroxla.plan`.
    """
    wanted, cluster, stages = options.model, options.cluster, options.pipeline
    remat = wanted.remat and options.zero.device_memory is None
    model, length = model_named(wanted.model, remat=remat)
    model = options.lora.adapted(model)
    if stages.pipe > 1:
        model = Pipeline.from_model(model, **stages.as_arguments)
    if options.compilation.compile:
        prepare_cpu(stages.pipe * cluster.nodes * cluster.devices_per_node)
    config = _config(options)
    return plan(
        model,
        _mesh_shape(options),
        _batch(options, length, config.num_micro_batches),
        optimizer=_optimizer(options, config),
        config=config,
        weights=stages.weights,
        generating=_generating(options),
        islands=options.outer.planned(),
        devices_per_node=cluster.devices_per_node,
        **_machines(options),
        compiled=options.compilation.compile,
    )


def _mesh_shape(options: PlanOptions) -> dict[str, int]:
    """Return the lengths of the mesh's axes, outermost first.

    Raises:
      ValueError: the axes that split the work on one row do not fit the nodes.
    """
    cluster, axes = options.cluster, options.axes
    split = {EXPERT: axes.expert, CONTEXT: axes.context, TENSOR: axes.tensor}
    nodes, data = lengths_beside(cluster.nodes, cluster.devices_per_node, split)
    return {PIPE: options.pipeline.pipe, NODE: nodes, DEVICE: data, **split}


def search_from(options: PlanOptions, progress: Any) -> Search:
    """Run the search that options ask for.

    Raises:
      ValueError: as `zeroxla.search_plans`.
    """
    wanted, cluster = options.model, options.cluster
    config = _config(options)
    models = {remat: model_named(wanted.model, remat=remat) for remat in (False, True)}
    return search_plans(
        {remat: model for remat, (model, _) in models.items()},
        cluster.nodes,
        cluster.devices_per_node,
        _batch(options, models[True][1], ROWS_PER_DEVICE),
        config=config,
        optimizer=_optimizer(options, config),
        generating=_generating(options),
        progress=progress,
        **_machines(options),
    )


def _run_search(options: PlanOptions, console: Console) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        found = search_from(options, progress)
    console.print(found.table(options.output.rows))
    for note in found.notes():
        console.print(note, markup=False, soft_wrap=True)
    best = found.best
    least = found.found[0].plan
    console.print(least.verdict(), markup=False, soft_wrap=True)
    if best is None:
        console.print(
            "Nothing that was tried fits. The first row needs least; with more nodes a device "
            "needs less: zeroxla plan without --search says how many.",
            soft_wrap=True,
        )
    if options.output.picture is not None:
        plot_search(found, path=options.output.picture)
        console.print(f"Picture: {options.output.picture}", markup=False, soft_wrap=True)
    return 1 if best is None else 0


def _smallest_cluster(options: PlanOptions, found: Plan) -> str:
    """Return a sentence about the number of nodes on which a step would fit, with as many sequences
    for each device."""
    nodes = options.cluster.nodes
    rows = found.num_examples // nodes

    def needs(more: int) -> float:
        changed = dataclasses.replace(
            options,
            cluster=dataclasses.replace(options.cluster, nodes=more),
            model=dataclasses.replace(options.model, batch=rows * more),
            compilation=dataclasses.replace(options.compilation, compile=False),
        )
        try:
            _mesh_shape(changed)
        except ValueError:  # axes that take several nodes do not fit this many
            return math.inf
        return plan_from(changed).most_bytes

    room = found.target.device.usable_bytes
    least = smallest(needs, room, (nodes, found.most_bytes))
    each = f"nodes of {options.cluster.devices_per_node} such devices"
    if least is None:
        return (
            f"No number of {each} would hold it: what does not shrink with them (activations, a "
            "whole unit, secondary shards) is too much; use --remat, a shorter --length, a smaller "
            "--batch for each device, --pipe, or --zero zero3"
        )
    return (
        f"The smallest cluster of {each} that would hold it, with as many sequences a device: "
        f"--nodes {least} --batch {rows * least}."
    )


def _config(options: PlanOptions) -> ZeroConfig:
    usual = {"compute_dtype": "bfloat16"}
    return zero_config(options, usual, path=_NOWHERE, outer=options.outer)


def _optimizer(options: PlanOptions, config: ZeroConfig) -> Any:
    """Return the optimizer, whose rates a plan does not need."""
    if config.optimizer is None or options.training.optimizer is not None:
        return options.training.make(3e-4)
    options.training.check_own(type(options.training)())
    return config.optimizer


def _batch(options: PlanOptions, context: int, rows_per_device: int) -> dict[str, Any]:
    wanted, cluster = options.model, options.cluster
    groups = cluster.nodes * cluster.devices_per_node
    if not options.output.search:
        shape = _mesh_shape(options)
        groups = shape[NODE] * shape[DEVICE]
    rows = wanted.batch or groups * rows_per_device
    shape = (rows, (wanted.length or context) + 1)
    return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}


def _generating(options: PlanOptions) -> Generating | None:
    asked = options.generation
    if asked.prompts is None:
        return None
    return Generating(
        num_prompts=asked.prompts,
        prompt_length=asked.prompt_length,
        new_tokens=asked.new_tokens,
        tensor=asked.generation_tensor,
    )


def _machines(options: PlanOptions) -> dict[str, Any]:
    cluster = options.cluster
    return {
        "device": cluster.device,
        "link": cluster.link,
        "machines": cluster.machines,
        "memory_fraction": cluster.memory_fraction,
    }


def _calibrated(found: Plan, seconds: float) -> Plan:
    """Return the plan for the device on which the step takes so long."""
    device = calibrated(found.target.device, lambda other: found.on(device=other), seconds)
    return found.on(device=device)
