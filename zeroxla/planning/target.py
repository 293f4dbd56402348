"""The cluster that a step runs on: its devices, links and mesh, and how long each of them takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import AbstractDevice, AbstractMesh

from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.work import Work

HOST = "host"
"""The lane between a device and its host's memory."""
HOST_UPDATE = "host update"
"""The lane of a host's computation for one of its devices."""
DISK = "disk"
"""The lane between a host's memory and its disk."""

DISK_LINK = "nvme4"
"""The name of a host's disk in the tables, unless `Plan.on` is given another link."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedDevice(AbstractDevice):
    """A kind of device that need not exist.

    Attributes:
      compute_capability: of an NVIDIA GPU, such as "9.0"; empty for other devices.
    """

    compute_capability: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The cluster that a step runs on.

    Attributes:
      device: the kind of each device.
      links: the link of each mesh axis, of `HOST` and of `DISK`.
      mesh_shape: axis lengths, outermost first.
    """

    device: Device
    links: Mapping[str, Link]
    mesh_shape: Mapping[str, int]

    @staticmethod
    def find(
        mesh_shape: Mapping[str, int],
        *,
        device: str | Device,
        link: str | Link,
        machines: str | Path | Machines | None,
        memory_fraction: float | None = None,
    ) -> Target:
        """Look devices and links up in the tables; arguments as `zeroxla.plan` takes them.

        Raises:
          ValueError: an unknown device, link or axis, a length below 1, or a fraction that is none.
        """
        if not isinstance(machines, Machines):
            machines = Machines.load(machines)
        device = machines.find_device(device) if isinstance(device, str) else device
        if memory_fraction is not None:
            if not 0 < memory_fraction <= 1:
                raise ValueError(
                    f"memory_fraction={memory_fraction}: give the share of a device's memory that "
                    "JAX takes, above 0 and at most 1"
                )
            device = dataclasses.replace(device, usable=memory_fraction)
        between = machines.find_link(link) if isinstance(link, str) else link
        shape = _all_axes(mesh_shape)
        links = {
            DEVICE: machines.find_link(device.link),
            NODE: between,
            PIPE: between,
            HOST: machines.find_link(device.host_link),
            DISK: machines.find_link(DISK_LINK),
        }
        return Target(device=device, links=links, mesh_shape=shape)

    def abstract_mesh(self) -> AbstractMesh:
        """Return a mesh of devices that need not exist, to trace a step on."""
        kind = self.device
        # A GPU of a user's table may lack the number; with bfloat16 it is Ampere at least.
        capability = kind.compute_capability or ("8.0" if kind.has_attention else "")
        device = PlannedDevice(kind.label, None, kind.platform, capability)
        shape = self.mesh_shape
        return AbstractMesh(tuple(shape.values()), tuple(shape), abstract_device=device)

    def seconds(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return the seconds that a collective over one axis takes."""
        size = self.mesh_shape[axis]
        link = self.links[axis]
        sharing = 1
        if link.of == "node" and axis in (NODE, PIPE):
            # The devices of a node send at the same time.
            sharing = math.prod(n for a, n in self.mesh_shape.items() if a not in (NODE, PIPE))
        rounds = 1 if kind == "collective-permute" else size - 1
        received = received_bytes(kind, int(num_bytes), size)
        return rounds * link.latency_s + received * sharing / link.bytes_per_s

    def host_s(self, num_bytes: float) -> float:
        """Return the seconds to move bytes between a device and its host's memory."""
        link = self.links[HOST]
        return link.latency_s + num_bytes / link.bytes_per_s

    def host_update_s(self, num_bytes: float) -> float:
        """Return the seconds in which a host reads or writes `num_bytes` of its memory for each of
        its devices."""
        return num_bytes * self.mesh_shape[DEVICE] / self.device.host_bytes_per_s

    def disk_s(self, num_bytes: float) -> float:
        """Return the seconds in which a host reads `num_bytes` from its disk for each of its
        devices, and writes as many at the same time."""
        link = self.links[DISK]
        sharing = self.mesh_shape[DEVICE] if link.of == "node" else 1
        return link.latency_s + num_bytes * sharing / link.bytes_per_s

    def compute_s(self, work: Work) -> float:
        """Return the seconds that a device takes for the work of an equation."""
        return max(self.products_s(work), self.memory_s(work.num_bytes))

    def products_s(self, work: Work) -> float:
        """Return the seconds that the FLOPs of an equation take."""
        return work.flops / self.device.rate(work.dtype)

    def memory_s(self, num_bytes: float) -> float:
        """Return the seconds in which a device reads or writes `num_bytes` of its memory."""
        return num_bytes / self.device.memory_rate


def _all_axes(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of a mesh's axes, outermost first; `pipe` only if it is above 1.

    Raises:
      ValueError: an unknown axis, or a length below 1.
    """
    known = (PIPE, NODE, DEVICE)
    if unknown := set(mesh_shape) - set(known):
        raise ValueError(f"the mesh has the axes {sorted(unknown)}; there are {known}")
    shape = {axis: mesh_shape.get(axis, 1) for axis in known}
    for axis, length in shape.items():
        if length < 1 or length != int(length):
            raise ValueError(f"the mesh has {axis}={length}; give a whole number, 1 or more")
    if shape[PIPE] == 1:
        del shape[PIPE]
    return shape
