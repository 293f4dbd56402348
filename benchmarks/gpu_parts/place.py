"""Where the programs of a part go: the devices of this process, or a GPU that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import zeroxla
from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.planning.gpu_topology import H200, UNCHECKED, target_mesh
from zeroxla.planning.target import PlannedDevice
from zeroxla.program.compat import mesh_context

Kind = Literal["devices", "target", "platform"]
ABSENT = PlannedDevice("NVIDIA H200", None, "gpu", "9.0")
"""The GPU that programs are lowered for where there is no compiler for it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where programs go.

    Attributes:
      kind: "devices" runs them on the devices of this process. "target" compiles them for an H200
        that is not there. "platform" lowers them for the platform "cuda" and compiles nothing.
      num_devices: the number of devices.
      small: take sizes that simulated devices run in seconds.
      simulated: the devices are this process's CPU.
    """

    kind: Kind
    num_devices: int
    small: bool = False
    simulated: bool = False

    def start(self) -> None:
        """Prepare the process; call this before JAX has devices."""
        if self.kind != "devices":
            os.environ.setdefault(UNCHECKED, "1")
        if self.kind != "devices" or self.simulated:
            zeroxla.simulate(self.num_devices)

    def mesh(self, *, pipe: int = 1, nodes: int = 1, present: bool = False) -> Any:
        """Return a mesh of all devices, an abstract one where programs are lowered only.

        Args:
          pipe: number of stages.
          nodes: length of the axis `node`.
          present: take simulated devices instead of an abstract mesh, for a program that asks its
            devices for more than a trace does.
        """
        per_node = self.num_devices // (pipe * nodes)
        if self.kind == "devices" or (present and self.kind == "platform"):
            mine = jax.devices()[: pipe * nodes * per_node]
            return zeroxla.make_mesh(pipe=pipe, nodes=nodes, devices=mine)
        shape = {PIPE: pipe, NODE: nodes, DEVICE: per_node}
        if pipe == 1:
            del shape[PIPE]
        if self.kind == "target":
            return target_mesh(H200, shape)
        return absent_mesh(shape)

    def lower(self, function: Callable[..., Any], *shapes: Any) -> jax.stages.Lowered:
        """Lower a function of arrays, without a mesh, for one device of an absent GPU.

        Args:
          function: the function, jitted or not.
          *shapes: pytrees of `jax.ShapeDtypeStruct`.
        """
        if self.kind == "target":
            whole = NamedSharding(one_device(), PartitionSpec())
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
            )
        mesh = one_device() if self.kind == "target" else absent_mesh({NODE: 1, DEVICE: 1})
        with mesh_context(mesh), self.lowering():  # pyright: ignore[reportArgumentType]
            return jax.jit(function).lower(*shapes)

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        """Return a context in which `lower` of jitted functions lowers for CUDA, whatever this
        process has. Programs for a target know their platform from their devices.

        JAX takes the platform as an argument of `jax.stages.Traced.lower` only, and steps and
        engines call `lower` without it.
        """
        if self.kind != "platform":
            yield
            return
        own = jax.stages.Traced.lower
        for_cuda: Any = functools.partialmethod(own, lowering_platforms=("cuda",))
        jax.stages.Traced.lower = for_cuda
        try:
            yield
        finally:
            jax.stages.Traced.lower = own

    def capability(self) -> float:
        """Return the compute capability of the NVIDIA GPUs of this process; 0 if it has none."""
        if self.kind != "devices" or jax.default_backend() != "gpu":
            return 0.0
        return float(getattr(jax.devices()[0], "compute_capability", 0))


@functools.cache
def one_device() -> Mesh:
    """Return a mesh of one H200 that is not there."""
    return target_mesh(H200, {NODE: 1, DEVICE: 1})


def absent_mesh(shape: Mapping[str, int]) -> AbstractMesh:
    """Return a mesh of H200 that nothing is compiled for."""
    return AbstractMesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        abstract_device=ABSENT,
    )


def rows_for(devices: int, least: int) -> int:
    """Return the rows of a batch: at least so many, and as many on each device."""
    return math.ceil(least / devices) * devices


def peak_bytes() -> int | None:
    """Return the most bytes that a device of this process has had in use, as its allocator counts
    them; None where the allocator does not count."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if not all("peak_bytes_in_use" in of_device for of_device in stats):
        return None
    return max(of_device["peak_bytes_in_use"] for of_device in stats)
