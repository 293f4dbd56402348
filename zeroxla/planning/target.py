"""The cluster that a step runs on: its devices, links and mesh, and how long each of them takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from jax.sharding import AbstractDevice, AbstractMesh

from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh.axes import DEVICE, NODE, PIPE, SPLIT_AXES, nodes_along
from zeroxla.mesh.machines import Device, Link, Machines
from zeroxla.planning.wire_bytes import leaving_share
from zeroxla.planning.work import Work
from zeroxla.split.axis_costs import AxisCosts

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
      axis_costs: what each axis costs that splits the work on one row, by name; see `costs_on`.
    """

    compute_capability: str = ""
    axis_costs: tuple[tuple[str, AxisCosts], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The cluster that a step runs on.

    Attributes:
      device: the kind of each device.
      links: the link of each mesh axis, of `HOST` and of `DISK`.
      mesh_shape: axis lengths, outermost first.
      devices_per_node: the number of devices of a node. None means that the axis `device` and those
        after it are a node.
    """

    device: Device
    links: Mapping[str, Link]
    mesh_shape: Mapping[str, int]
    devices_per_node: int | None = None

    @staticmethod
    def find(
        mesh_shape: Mapping[str, int],
        *,
        device: str | Device,
        link: str | Link,
        machines: str | Path | Machines | None,
        memory_fraction: float | None = None,
        devices_per_node: int | None = None,
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
        found = Target(
            device=device, links=links, mesh_shape=shape, devices_per_node=devices_per_node
        )
        found.check_node()
        own = {axis: links[found.link_of(axis)] for axis in SPLIT_AXES if axis in shape}
        return dataclasses.replace(found, links={**links, **own})

    def abstract_mesh(self) -> AbstractMesh:
        """Return a mesh of devices that need not exist, to trace a step on."""
        kind = self.device
        # A GPU of a user's table may lack the number; with bfloat16 it is Ampere at least.
        capability = kind.compute_capability or ("8.0" if kind.has_attention else "")
        shape = self.mesh_shape
        costs = tuple((axis, self.axis_costs(axis)) for axis in SPLIT_AXES if axis in shape)
        device = PlannedDevice(kind.label, None, kind.platform, capability, costs)
        return AbstractMesh(tuple(shape.values()), tuple(shape), abstract_device=device)

    @property
    def node_size(self) -> int:
        """The number of devices of a node."""
        inside = math.prod(n for a, n in self.mesh_shape.items() if a not in (NODE, PIPE))
        return inside if self.devices_per_node is None else self.devices_per_node

    def check_node(self) -> None:
        """Check that the axes inside a stage fit its nodes.

        Raises:
          ValueError: they do not.
        """
        together = 1
        for axis in reversed([a for a in self.mesh_shape if a not in (NODE, PIPE)]):
            together *= self.mesh_shape[axis]
            if self.node_size % together and together % self.node_size:
                raise ValueError(
                    f"devices_per_node={self.node_size} on the mesh {dict(self.mesh_shape)}: the "
                    f"last axes, from {axis!r} on, have {together} devices, which neither divide "
                    "a node nor fill nodes; take other lengths"
                )

    def link_of(self, axis: str) -> str:
        """Return the axis whose link an axis takes too: `device` inside a node, `node` over several
        nodes; itself if it is no axis that splits the work on one row."""
        if axis not in SPLIT_AXES:
            return axis
        over = nodes_along(self.mesh_shape, self.node_size, axis)
        return NODE if over > 1 else DEVICE

    @property
    def shared_links(self) -> dict[str, str]:
        """By axis that splits the work on one row, the axis whose link it takes too."""
        return {a: self.link_of(a) for a in SPLIT_AXES if a in self.mesh_shape}

    def seconds(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return the seconds that a collective over one axis takes."""
        size = self.mesh_shape[axis]
        link = self.links[axis]
        rounds = 1 if kind == "collective-permute" else size - 1
        received = received_bytes(kind, int(num_bytes), size)
        latency_s = rounds * link.latency_s
        if self.link_of(axis) not in (NODE, PIPE):
            return latency_s + received / link.bytes_per_s
        # The devices of a node send at the same time.
        rate = link.bytes_per_s * (1 if link.of == "node" else self.node_size)
        seconds = received * leaving_share((axis,), self.mesh_shape, self.node_size, kind) / rate
        if axis in SPLIT_AXES:
            seconds = max(seconds, received / self.links[DEVICE].bytes_per_s)
        return latency_s + seconds

    def axis_costs(self, axis: str) -> AxisCosts:
        """Return what an axis costs that splits the work on one row. On CPUs it is what a step on
        them takes, which are simulated devices most often."""
        if self.device.platform == "cpu":
            return AxisCosts()
        gathered = 1e9
        latency_s = self.seconds(axis, "all-gather", 0)
        seconds = self.seconds(axis, "all-gather", gathered) - latency_s
        received = received_bytes("all-gather", int(gathered), self.mesh_shape[axis])
        return AxisCosts.of(self.device, link=seconds / received, latency=latency_s)

    def host_s(self, num_bytes: float) -> float:
        """Return the seconds to move bytes between a device and its host's memory."""
        link = self.links[HOST]
        return link.latency_s + num_bytes / link.bytes_per_s

    def host_update_s(self, num_bytes: float) -> float:
        """Return the seconds in which a host reads or writes `num_bytes` of its memory for each of
        its devices."""
        return num_bytes * self.node_size / self.device.host_bytes_per_s

    def disk_s(self, num_bytes: float) -> float:
        """Return the seconds in which a host reads `num_bytes` from its disk for each of its
        devices, and writes as many at the same time."""
        link = self.links[DISK]
        sharing = self.node_size if link.of == "node" else 1
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
    known = (PIPE, NODE, DEVICE, *SPLIT_AXES)
    if unknown := set(mesh_shape) - set(known):
        raise ValueError(f"the mesh has the axes {sorted(unknown)}; there are {known}")
    shape = {axis: mesh_shape.get(axis, 1) for axis in known}
    for axis, length in shape.items():
        if length < 1 or length != int(length):
            raise ValueError(f"the mesh has {axis}={length}; give a whole number, 1 or more")
    return {axis: n for axis, n in shape.items() if n > 1 or axis in (NODE, DEVICE)}
