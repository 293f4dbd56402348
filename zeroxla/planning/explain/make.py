"""`zeroxla.explain`: what a training step waits for on devices that need not be there, and which
settings would change it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, cast

from jax.sharding import AbstractMesh, Mesh

from zeroxla.mesh.axes import platform_of
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.budget import for_target
from zeroxla.planning.compile_check import CompiledStepProgram, compiled_for, compiled_here
from zeroxla.planning.explain.hlo_clock import HloClock
from zeroxla.planning.explain.lines import lines_of
from zeroxla.planning.explain.link_uses import link_uses_of
from zeroxla.planning.explain.matching import OriginFinder
from zeroxla.planning.explain.remedies import Case
from zeroxla.planning.explain.report import SCHEDULE, TRACE, Explanation
from zeroxla.planning.explain.stalls import Stall, large, large_residuals, unfused, waiting
from zeroxla.planning.explain.traced import ExplainedTrace, least_bytes, rewritable
from zeroxla.planning.explain.waits import waits_of
from zeroxla.planning.lanes import TimeLine
from zeroxla.planning.target import Target
from zeroxla.program import hlo
from zeroxla.program.phases import phase_of
from zeroxla.step.describe import Description
from zeroxla.step.step import Step

DEFAULT_DEVICE = "h200"
"""The device for steps on CPUs, which stand for others most often. XLA can compile for it."""


def explain(
    step: Step,
    batch: Any = None,
    *,
    device: str | Device | None = None,
    link: str | Link = "100gbit",
    machines: str | Path | Machines | None = None,
    devices_per_node: int | None = None,
    compiled: bool = True,
    least_share: float = 0.01,
) -> Explanation:
    """Explain what a training step waits for, and which settings would change it.

    The report lists every collective that nothing hides, by unit and layer, with its time and the
    setting that would hide it; attention and losses that could be computed by blocks; residuals
    that take much memory; and the lines of the model that cost most. Nothing runs.

    Args:
      step: a step. Its mesh gives the lengths of the axes; the devices may be others.
      batch: a global batch, or its shapes. None means the batch that the step has seen last.
      device: the kind of device that is explained, by its name in the tables. None means the kind
        of the step's mesh, and an H200 for CPUs.
      link: the link between nodes, by its name in the tables or by a rate such as "100gbit".
      machines: a TOML file with more devices and links.
      devices_per_node: the number of devices of a node. None means that the axis `device` and those
        after it are a node.
      compiled: also compile the step. For a GPU that the tables describe, with the wheels of the
        extra `plan-gpu`, the waits are then read from the compiler's schedule. Otherwise the waits
        follow from the trace, and the collectives that the compiler adds to the update from a
        program for CPUs, for as many as the mesh has devices. Without, these are not known.
      least_share: waits below this share of the step are no stalls.

    Returns:
      The report: print it, `plot()` it, or read `stalls`, each with its `remedy`.

    Raises:
      ValueError: the argument is no step, it has seen no batch and none is given, an unknown device
        or link, a share that is none, or too few CPU devices to compile for.

    Cost: two traces of the step, with `compiled` also a compilation. Times are a simulation: a
    roofline for what is computed, latency and bytes for what travels. Starting kernels takes
    nothing in it.

    >>> import jax, zeroxla
    >>> from zeroxla.models import GPT
    >>> step = zeroxla.make_step(GPT.tiny(), zeroxla.make_mesh(nodes=1))
    >>> tokens = {"tokens": jax.ShapeDtypeStruct((8, 33), "int32")}
    >>> found = zeroxla.explain(step, tokens, compiled=False)
    >>> found.target.device.label
    'NVIDIA H200 SXM'
    """
    if not isinstance(step, Step):
        raise ValueError(f"explain() explains a zeroxla.Step, not {type(step).__name__}")
    if not 0 <= least_share < 1:
        raise ValueError(f"least_share={least_share}: give a share of the step, from 0 to below 1")
    batch = step.batches.last if batch is None else batch
    target = _target(step, device, link, machines, devices_per_node)
    with warnings.catch_warnings():
        # Whoever made the step has been warned already of options without effect.
        warnings.simplefilter("ignore", UserWarning)
        config = for_target(step.config, target)
        planned = step.on_mesh(cast(Mesh, target.abstract_mesh()), config)
        traced = ExplainedTrace.of(planned, batch, target)
        program = None
        if compiled and device is None and _kind_of(step) and target.device.platform == "gpu":
            program = compiled_here(step, batch)
        elif compiled:
            program = compiled_for(lambda mesh: step.on_mesh(mesh, config), batch, target)
        findings, remark = rewritable(planned, batch)
        residuals = _large_residuals(planned, batch, traced)
    time, by, source = _timed(traced, program, target)
    # A compiled program's instructions do not say which lines they are of.
    computed = traced.with_update() if by == SCHEDULE else time
    waits = waits_of(time.events, time.seconds)
    uses = link_uses_of(time.events, waits)
    least_s = least_share * time.seconds
    case = _case(planned, target)
    stalls: list[Stall] = [
        *waiting(uses, case, least_s),
        *unfused(findings, traced.time.events, target, least_s),
        *residuals,
    ]
    return Explanation(
        target=target,
        by=by,
        source=source,
        time=time,
        waits=tuple(waits),
        uses=tuple(uses),
        lines=tuple(lines_of(computed.events, time.seconds)),
        stalls=tuple(sorted(stalls, key=lambda stall: -stall.seconds)),
        total_bytes=traced.total_bytes,
        remarks=(remark,) if remark else (),
        least_share=least_share,
    )


def _target(
    step: Step,
    device: str | Device | None,
    link: str | Link,
    machines: str | Path | Machines | None,
    devices_per_node: int | None,
) -> Target:
    tables = machines if isinstance(machines, Machines) else Machines.load(machines)
    kind = _kind_of(step)
    if device is None:
        device = tables.of_kind(kind) if kind else DEFAULT_DEVICE
    if device is None:
        raise ValueError(
            f"the tables lack the device {kind!r} of the step's mesh; pass device=, one of "
            f"{', '.join(sorted(tables.devices))}, or machines= with an entry for it"
        )
    shape = {str(axis): int(length) for axis, length in step.mesh.shape.items()}
    return Target.find(
        shape, device=device, link=link, machines=tables, devices_per_node=devices_per_node
    )


def _kind_of(step: Step) -> str:
    """Return JAX's name of the accelerators of a step's mesh; empty for CPUs, and for devices that
    are not there."""
    mesh = step.mesh
    if isinstance(mesh, AbstractMesh) or platform_of(mesh) == "cpu":
        return ""
    return mesh.devices.flat[0].device_kind


def _large_residuals(step: Step, batch: Any, traced: ExplainedTrace) -> list[Stall]:
    found = large(traced.residuals, traced.target)
    # A budget has decided already, and the stages of a pipeline keep what their schedule says.
    if not found or step.config.memory is not None or step.programs.pipeline is not None:
        return []
    least = least_bytes(step, batch, traced.target)
    return large_residuals(found, traced.total_bytes, least, traced.target)


def _timed(
    traced: ExplainedTrace, compiled: CompiledStepProgram | None, target: Target
) -> tuple[TimeLine, str, str]:
    """Return the time line of a step, what it follows from, and sentences about that."""
    simulated = "Waits follow from the step's trace, simulated on the target."
    if compiled is None:
        words = "Collectives that the compiler adds to the update are not known: compiled=False."
        return traced.with_update(), TRACE, f"{simulated} {words}"
    module = hlo.parse(compiled.program.as_text() or "")
    finder = OriginFinder(traced.time.events, traced.leaf_shapes)
    if compiled.platform == "gpu":
        time = HloClock(module, target, finder).run(scheduled=True)
        words = "Waits are read from the compiler's schedule, its times from a roofline."
        return time, SCHEDULE, f"{compiled.note} {words}"
    if traced.simulation.is_offloaded:
        words = "The update of an offloaded state counts by its bytes alone."
        return traced.with_update(), TRACE, f"{simulated} {words}"
    update = HloClock(module, target, finder, wanted=_is_update).run(scheduled=False)
    words = "The update is that of a program for other devices:"
    return _joined(traced.time, update), TRACE, f"{simulated} {words} {compiled.note}"


def _is_update(path: str) -> bool:
    return phase_of(path, "") in ("update", "owners")


def _joined(first: TimeLine, second: TimeLine) -> TimeLine:
    """Return one time line after another."""
    lanes = {**first.busy_s, **second.busy_s}
    busy_s = {x: first.busy_s.get(x, 0.0) + second.busy_s.get(x, 0.0) for x in lanes}
    return dataclasses.replace(
        first,
        seconds=first.seconds + second.seconds,
        busy_s=busy_s,
        events=(*first.events, *(event.later(first.seconds) for event in second.events)),
    )


def _case(step: Step, target: Target) -> Case:
    described = step.describe()
    is_pipeline = step.programs.pipeline is not None
    return Case(
        config=step.config,
        target=target,
        weights=step.programs.weights if is_pipeline else "",
        unit_elements=described.largest_unit if isinstance(described, Description) else 0,
    )
