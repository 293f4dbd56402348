"""What a mesh's devices have: memory, and the rates by which computing again is weighed against
moving."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.mesh.axes import platform_of
from zeroxla.mesh.machines import Device, Machines

DEFAULT_DEVICE = "h100"
"""The device whose rates are taken for one that is in no table."""


def device_bytes(mesh: Mesh) -> int:
    """Return the bytes that a program may hold on a device of the mesh.

    Raises:
      ValueError: the device says nothing about its memory, and no table has it.
    """
    device: Any = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    stats = (device.memory_stats() or {}) if isinstance(device, jax.Device) else {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    kind = getattr(device, "device_kind", "")
    known = Machines.load().of_kind(kind)
    if known is None or platform_of(mesh) == "cpu":
        raise ValueError(
            f"memory='device': a device of kind {kind or 'unknown'!r} does not say how much memory "
            "it has; give an amount, such as memory='24GB'"
        )
    return int(known.usable_bytes)


def rates_of(mesh: Mesh, dtype: str, *, host: bool) -> DeviceRates:
    """Return what computing again and moving costs on the mesh's devices.

    Args:
      mesh: the mesh.
      dtype: the dtype in which the model computes.
      host: whether values may wait in the host's memory.
    """
    machines = Machines.load()
    known: Device | None = None
    if not isinstance(mesh, AbstractMesh):
        known = machines.of_kind(getattr(mesh.devices.flat[0], "device_kind", ""))
    device = known or machines.find_device(DEFAULT_DEVICE)
    return DeviceRates(
        flops_per_s=device.rate(dtype),
        bytes_per_s=device.memory_rate,
        gathered_bytes_per_s=machines.find_link(device.link).bytes_per_s,
        host_bytes_per_s=machines.find_link(device.host_link).bytes_per_s if host else None,
    )
