"""What the axes of a mesh cost, from the devices and links that they have."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zeroxla.mesh.machines import Machines
from zeroxla.mesh.processes.start import nodes_of_processes
from zeroxla.split.axis_costs import AxisCosts

BETWEEN_NODES = 1 / 25e9, 20e-6
"""Seconds for a byte that a device receives from another node, and the latency of a message. A mesh
does not know its links between nodes."""


def costs_on(mesh: Mesh, axis: str) -> AxisCosts:
    """Return what an axis of a mesh costs.

    Planned devices bring the costs themselves (see planning/target.py). For devices that are there
    they come from the table of machines. Devices that the table lacks, and simulated ones, have the
    defaults of `AxisCosts`. An axis over several nodes has the link `BETWEEN_NODES`.
    """
    if isinstance(mesh, AbstractMesh):
        device: Any = mesh.abstract_device
        return dict(getattr(device, "axis_costs", ())).get(axis, AxisCosts())
    machines, hops = Machines.load(), mesh.shape[axis] - 1
    machine = machines.of_kind(mesh.devices.flat[0].device_kind)
    found = AxisCosts()
    if machine is not None and machine.platform != "cpu":
        link = machines.find_link(machine.link)
        found = AxisCosts.of(machine, link=1 / link.bytes_per_s, latency=hops * link.latency_s)
    if not _is_inside_node(mesh, axis):
        per_byte, latency = BETWEEN_NODES
        found = dataclasses.replace(found, link=per_byte, latency=hops * latency)
    return found


def _is_inside_node(mesh: Mesh, axis: str) -> bool:
    """Return whether the devices along an axis, from the mesh's first one, are of one node."""
    if jax.process_count() == 1:
        return True
    at = tuple(slice(None) if name == axis else 0 for name in mesh.axis_names)
    nodes = nodes_of_processes()
    return len({nodes[device.process_index] for device in mesh.devices[at]}) == 1
