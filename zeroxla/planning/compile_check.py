"""A planned step, compiled ahead of time: the compiler's own memory per device and collectives."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table
from rich.text import Text

from zeroxla.config.offload import Offload
from zeroxla.inspect.comms import CommsReport, comms
from zeroxla.inspect.memory import memory
from zeroxla.mesh.machines import Device
from zeroxla.mesh.simulate import simulate
from zeroxla.planning.gpu_topology import WheelsMissingError, target_mesh
from zeroxla.planning.memory_model import MemoryPlan
from zeroxla.program.compat import backends_started
from zeroxla.program.compiled_memory import MemoryReport
from zeroxla.program.report import Report, format_bytes
from zeroxla.step.step import Step

# XLA's CPU scheduler prefers concurrency to memory; with this flag it does not. As a compiler
# option of one program it has no effect, so it must be in XLA_FLAGS before JAX starts.
MEMORY_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

MOST_CPU_DEVICES = 64
"""The more of them, the longer XLA's partitioner takes, and each has threads."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPlan(Report):
    """What the compiler says of a step.

    Attributes:
      memory: of one device.
      comms: what travels, the compiler's own collectives included.
      platform: whose program it is.
      note: for which device it was compiled and with what; of the CPU backend's program also why
        it is that.
    """

    memory: MemoryReport
    comms: CommsReport
    platform: Literal["gpu", "cpu"]
    note: str

    def beside(self, memory: MemoryPlan, comms: CommsReport) -> Table:
        """Return the plan's figures beside the compiler's, as a rich table."""
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


def compile_step(
    step_on: Callable[[Mesh], Step], batch: Any, device: Device, mesh_shape: Mapping[str, int]
) -> CompiledPlan:
    """Compile a step for devices that need not be there.

    They are GPUs where the device has a description and the wheels of the extra `plan-gpu` are
    installed; else CPU devices of this process, for which the note gives the reason.

    Args:
      step_on: makes the step for a mesh.
      batch: shapes (or arrays) of a global batch.
      device: of the target.
      mesh_shape: lengths of its axes, outermost first.

    Raises:
      ValueError: a description that cannot be read; or, for the CPU backend, more than 64 devices,
        or more than JAX shows in this process.

    Cost: one compilation, minutes for a model that is not scanned; nothing runs or is allocated.
    """
    mesh, note = _gpus(device, mesh_shape)
    platform: Literal["gpu", "cpu"] = "cpu" if mesh is None else "gpu"
    if mesh is None:
        mesh, note = _cpus(mesh_shape, note)
    step = step_on(mesh)
    if step.config.offload != Offload():
        note = f"{note} It counts the host's memory as the device's own."
    program = step.lower(step.abstract_state(batch), batch).compile()
    return CompiledPlan(
        memory=memory(program), comms=comms(program, mesh), platform=platform, note=note
    )


def prepare_cpu(num_devices: int) -> None:
    """Show this process's CPU as so many devices, for programs that are scheduled for memory.

    Without effect once JAX has started, and for more devices than the CPU backend compiles for:
    whether there are enough is `compile_step`'s to say, where it needs them.
    """
    if backends_started() or num_devices > MOST_CPU_DEVICES:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    if MEMORY_SCHEDULER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {MEMORY_SCHEDULER}".strip()
    simulate(num_devices)


def _gpus(device: Device, mesh_shape: Mapping[str, int]) -> tuple[Mesh | None, str]:
    """Return a mesh of the target's GPUs and what it is; or None, and why there is none."""
    if device.platform == "cpu":
        return None, ""
    if not device.target:
        return None, f"there is no description of {device.label} to compile for"
    try:
        mesh = target_mesh(device.target, mesh_shape)
    except WheelsMissingError as error:
        return None, str(error)
    wheels = f"jax {jax.__version__} and jax-cuda13-plugin {version('jax-cuda13-plugin')}"
    return mesh, f"Compiled for {mesh.size} {device.label} by {wheels}."


def _cpus(mesh_shape: Mapping[str, int], reason: str) -> tuple[Mesh, str]:
    """Return a mesh of this process's CPU devices, and what it is and why.

    Raises:
      ValueError: there are not so many.
    """
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
