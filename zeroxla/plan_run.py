"""The job of `zeroxla plan`."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
from rich.console import Console

from zeroxla.config import ZeroConfig
from zeroxla.inspect.pictures import plot_plan
from zeroxla.mesh import DEVICE, NODE
from zeroxla.plan_options import PlanOptions
from zeroxla.planning.calibrate import calibrated, entry
from zeroxla.planning.plan import Plan, plan
from zeroxla.planning.presets import model_named


def plan_from(options: PlanOptions) -> Plan:
    """Make the plan that options ask for.

    Raises:
      ValueError: as `zeroxla.plan`.
    """
    wanted, cluster, step = options.model, options.cluster, options.step
    model, length = model_named(wanted.model, remat=wanted.remat)
    length = wanted.length or length
    world = cluster.nodes * cluster.devices_per_node
    rows = wanted.batch or world * step.accumulate
    config = getattr(ZeroConfig, step.zero)(
        compute_dtype=step.compute_dtype, accumulate=step.accumulate
    )
    return plan(
        model,
        {NODE: cluster.nodes, DEVICE: cluster.devices_per_node},
        {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)},
        config=config,
        device=cluster.device,
        link=cluster.link,
        machines=cluster.machines,
    )


def run_plan(options: PlanOptions) -> int:
    """Print a plan, and draw it where that is asked for.

    Returns:
      The exit status: 0 if a device's memory holds the step, else 1.

    Raises:
      ValueError: as `plan_from` and `calibrated`.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with console.status("tracing the step"):
        found = plan_from(options)
        if options.cluster.measured_s is not None:
            found = _calibrated(found, options.cluster.measured_s)
    for table in found.tables():
        console.print(table)
    console.print(found.verdict(), markup=False, soft_wrap=True)
    if options.cluster.measured_s is not None:
        console.print("The device, for a file of --machines:")
        console.print(entry(found.target.device), markup=False, soft_wrap=True)
    if options.output.picture is not None:
        plot_plan(found, path=options.output.picture)
        console.print(f"Picture: {options.output.picture}", markup=False, soft_wrap=True)
    return 0 if found.fits else 1


def _calibrated(found: Plan, seconds: float) -> Plan:
    """Return the plan on the device that takes so long."""
    device = calibrated(found.target.device, lambda other: found.on(device=other), seconds)
    return found.on(device=device)
