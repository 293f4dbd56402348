"""What a step runs on: devices, links and a mesh; and how long they take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.mesh.machines import Device, Link
from zeroxla.planning.work import Work

HOST = "host"
"""The lane between a device and its host's memory."""
HOST_UPDATE = "host update"
"""The lane of what a host computes for one of its devices."""
DISK = "disk"
"""The lane between a host's memory and its disk."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a step runs on.

    Attributes:
      device: each of its devices.
      links: of each mesh axis, of `HOST` and of `DISK`.
      mesh_shape: axis lengths.
    """

    device: Device
    links: Mapping[str, Link]
    mesh_shape: Mapping[str, int]

    def seconds(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return what a collective over one axis takes."""
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
        """Return what it takes to move so much between a device and its host's memory."""
        link = self.links[HOST]
        return link.latency_s + num_bytes / link.bytes_per_s

    def host_update_s(self, num_bytes: float) -> float:
        """Return what it takes a host to read or write so much of its memory for each of its
        devices."""
        return num_bytes * self.mesh_shape[DEVICE] / self.device.host_bytes_per_s

    def disk_s(self, num_bytes: float) -> float:
        """Return what it takes a host to move so much for each of its devices in from its disk, and
        as much out at the same time."""
        link = self.links[DISK]
        sharing = self.mesh_shape[DEVICE] if link.of == "node" else 1
        return link.latency_s + num_bytes * sharing / link.bytes_per_s

    def compute_s(self, work: Work) -> float:
        """Return what an equation takes on a device."""
        return max(work.flops / self.device.rate(work.dtype), self.memory_s(work.num_bytes))

    def memory_s(self, num_bytes: float) -> float:
        """Return what a device takes to read or write so much of its memory."""
        return num_bytes / self.device.memory_rate
