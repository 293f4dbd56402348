"""A planned step, compiled ahead of time: the compiler's own figures for memory and collectives."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from zeroxla.config.offload import Offload
from zeroxla.inspect.comms import comms
from zeroxla.inspect.comms_report import CommsReport
from zeroxla.inspect.memory import memory
from zeroxla.mesh.simulate import simulate
from zeroxla.planning.gpu_topology import WheelsMissingError, target_mesh
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.planning.target import Target
from zeroxla.program.compat import backends_started
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.step import Step

if TYPE_CHECKING:
    from rich.table import Table

# XLA's CPU scheduler prefers concurrency to memory, except with this flag. It has no effect as a
# compiler option of one program, so it must be in XLA_FLAGS before JAX starts.
MEMORY_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

MOST_CPU_DEVICES = 64
"""The more devices, the longer XLA's partitioner takes; each of them also has threads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPlan(Report):
    """The compiler's figures for a step.

    Attributes:
      memory: the memory of one device.
      comms: the bytes that travel, the compiler's own collectives included.
      platform: the backend that compiled the program.
      note: the device that the program was compiled for, and the versions that compiled it. If it
        was the CPU backend, also the reason.
    """

    memory: MemoryReport
    comms: CommsReport
    platform: Literal["gpu", "cpu"]
    note: str

    def beside(self, memory: MemoryPlan, comms: CommsReport) -> Table:
        """Return the plan's figures beside the compiler's, as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title="The plan and the compiler", title_justify="left")
        table.caption, table.caption_justify = Text(self.note), "left"  # "[...]" is no markup
        for name in ("", "plan", "compiler", "plan / compiler"):
            table.add_column(name, justify="right" if name else "left")
        for name, planned, found in (
            ("memory of a device", memory.total_bytes, self.memory.total_bytes),
            ("received by a device", comms.total_bytes(), self.comms.total_bytes()),
            ("sent by a host to others", comms.cross_host_bytes(), self.comms.cross_host_bytes()),
        ):
            ratio = f"{planned / found:.3f}" if found else "-"
            table.add_row(name, format_bytes(planned), format_bytes(found), ratio)
        return table

    def tables(self) -> list[Table]:
        """Return memory and collectives, as rich tables."""
        tables = [self.memory.table(), self.comms.table()]
        for table in tables:
            table.title = f"{table.title}, says the compiler"
        return tables

    def notes(self) -> list[str]:
        """Return the note."""
        return [self.note]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStepProgram:
    """A step's program, compiled for devices that need not be there.

    Attributes:
      program: the program; of a state on disk, the part that computes the gradients.
      mesh: the mesh that it is compiled for.
      platform: the backend that compiled it.
      note: as in `CompiledPlan`.
    """

    program: jax.stages.Compiled
    mesh: Mesh
    platform: Literal["gpu", "cpu"]
    note: str


def compiled_for(
    step_on: Callable[[Mesh], Step], batch: Any, target: Target
) -> CompiledStepProgram:
    """Compile a step for devices that need not be there; everything is as for `compile_step`."""
    mesh, note = _gpus(target)
    platform: Literal["gpu", "cpu"] = "cpu" if mesh is None else "gpu"
    if mesh is None:
        mesh, note = _cpus(target, note)
    step = step_on(mesh)
    if step.config.offload != Offload():
        note = f"{note} It counts the host's memory as the device's own."
    program = step.lower(step.abstract_state(batch), batch).compile()
    return CompiledStepProgram(program=program, mesh=mesh, platform=platform, note=note)


def compiled_here(step: Step, batch: Any) -> CompiledStepProgram:
    """Compile a step for the GPUs of its own mesh."""
    program = step.lower(step.abstract_state(batch), batch).compile()
    kind = step.mesh.devices.flat[0].device_kind
    note = f"Compiled for the step's own {step.mesh.size} {kind} by jax {jax.__version__}."
    return CompiledStepProgram(program=program, mesh=step.mesh, platform="gpu", note=note)


def compile_step(step_on: Callable[[Mesh], Step], batch: Any, target: Target) -> CompiledPlan:
    """Compile a step for devices that need not be there.

    It is compiled for GPUs if the tables describe the target's device and the wheels of the extra
    `plan-gpu` are installed. Otherwise it is compiled for CPU devices of this process, and the note
    gives the reason.

    Args:
      step_on: makes the step for a mesh.
      batch: the shapes (or arrays) of a global batch.
      target: the devices and the mesh.

    Raises:
      ValueError: a description that cannot be read; or, for the CPU backend, more than 64 devices,
        or more than JAX shows in this process.

    Cost: one compilation, which takes minutes for a model that is not scanned. Nothing runs or is
    allocated.
    """
    found = compiled_for(step_on, batch, target)
    return CompiledPlan(
        memory=memory(found.program),
        comms=comms(found.program, found.mesh),
        platform=found.platform,
        note=found.note,
    )


def prepare_cpu(num_devices: int) -> None:
    """Show this process's CPU as `num_devices` devices, and schedule their programs for memory.

    This has no effect once JAX has started, nor for more devices than the CPU backend compiles for.
    `compile_step` reports it if there are too few devices.
    """
    if backends_started() or num_devices > MOST_CPU_DEVICES:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if MEMORY_SCHEDULER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {MEMORY_SCHEDULER}".strip()
    simulate(num_devices)


def _gpus(target: Target) -> tuple[Mesh | None, str]:
    """Return (a mesh of the target's GPUs, a note about it), or (None, why there is none)."""
    device = target.device
    if device.platform == "cpu":
        return None, ""
    if not device.target:
        return None, f"there is no description of {device.label} to compile for"
    try:
        mesh = target_mesh(device.target, target.mesh_shape)
    except WheelsMissingError as error:
        return None, str(error)
    wheels = f"jax {jax.__version__} and jax-cuda13-plugin {version('jax-cuda13-plugin')}"
    return mesh, f"Compiled for {mesh.size} {device.label} by {wheels}."


def _cpus(target: Target, reason: str) -> tuple[Mesh, str]:
    """Return a mesh of this process's CPU devices, and a note that says why it is not of GPUs.

    Raises:
      ValueError: there are too few devices.
    """
    mesh_shape = target.mesh_shape
    needed = math.prod(mesh_shape.values())
    because = f" ({reason})" if reason else ""
    if needed > MOST_CPU_DEVICES:
        raise ValueError(
            f"the step would be compiled by the CPU backend{because}, for {MOST_CPU_DEVICES} "
            f"devices at most, and the mesh {dict(mesh_shape)} has {needed}; plan a smaller mesh, "
            "or without compiled=True (--compile)"
        )
    devices = jax.local_devices(backend="cpu")
    if needed > len(devices):
        raise ValueError(
            f"the step would be compiled by the CPU backend{because}, for {needed} devices, and "
            f"JAX shows {len(devices)}; call zeroxla.simulate({needed}) before JAX starts"
        )
    grid = np.array(devices[:needed]).reshape(tuple(mesh_shape.values()))
    for_memory = MEMORY_SCHEDULER in os.environ.get("XLA_FLAGS", "")
    note = (
        f"Compiled for {needed} CPU devices by jax {jax.__version__}, scheduled for "
        f"{'memory' if for_memory else f'concurrency ({MEMORY_SCHEDULER} is not in XLA_FLAGS)'}"
    )
    return Mesh(grid, tuple(mesh_shape)), f"{note}{f': {reason}' if reason else ''}."
