"""What a mesh's devices have: memory, and the rates by which computing again is weighed against
moving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from zeroxla.config.wire_format import WireFormat
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.fetch.keeping.residual_graph import DeviceRates
from zeroxla.mesh.axes import DEVICE, NODE, platform_of
from zeroxla.mesh.machines import Device, Link, Machines

DEFAULT_DEVICE = "h100"
"""The device whose rates are taken for one that is in no table."""
DEFAULT_LINK = "100gbit"


def device_bytes(mesh: Mesh) -> int:
    """Return the bytes that a program may hold on a device of the mesh.

    Raises:
      ValueError: the device says nothing about its memory, and no table has it.
    """
    device: Any = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    # A process may ask its own devices alone.
    own: Any = None if isinstance(mesh, AbstractMesh) else next(iter(mesh.local_devices), None)
    stats = (own.memory_stats() or {}) if isinstance(own, jax.Device) else {}
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


def rates_of(mesh: Mesh, config: ZeroConfig) -> DeviceRates:
    """Return what computing again and moving costs on the mesh's devices. Between nodes it takes
    the link that `zeroxla.plan` takes if it is told none."""
    machines = Machines.load()
    known: Device | None = None
    if not isinstance(mesh, AbstractMesh):
        known = machines.of_kind(getattr(mesh.devices.flat[0], "device_kind", ""))
    device = known or machines.find_device(DEFAULT_DEVICE)
    links = {NODE: machines.find_link(DEFAULT_LINK), DEVICE: machines.find_link(device.link)}
    return rates_with(device, links, machines.find_link(device.host_link), mesh.shape, config)


def rates_with(
    device: Device,
    links: Mapping[str, Link],
    host_link: Link,
    mesh_shape: Mapping[str, int],
    config: ZeroConfig,
) -> DeviceRates:
    """Return what computing again and moving costs.

    Args:
      device: the kind of the devices.
      links: the links of the mesh axes `node` and `device`.
      host_link: the link to the host's memory.
      mesh_shape: axis lengths.
      config: the options.
    """
    in_node, num_devices = links[DEVICE].bytes_per_s, mesh_shape[DEVICE]
    slowest = in_node
    if mesh_shape[NODE] > 1:
        shared = num_devices if links[NODE].of == "node" else 1
        slowest = min(in_node, links[NODE].bytes_per_s / shared)
    size = num_devices if config.hpz_size == "node" else int(config.hpz_size)
    to_host = config.offload.activations == "host"
    bits = _bits(config.compute_dtype)
    of_leaf = bits / _wire_bits(config.weight_wire, config.gather_dtype or config.compute_dtype)
    of_gradient = bits / _wire_bits(config.gradient_wire, config.reduce_dtype or "float32")
    return DeviceRates(
        flops_per_s=device.rate(config.compute_dtype),
        bytes_per_s=device.memory_rate,
        gathered_bytes_per_s=of_leaf * (in_node if 1 < size <= num_devices else slowest),
        sent_bytes_per_s=of_leaf * slowest,
        reduced_bytes_per_s=of_gradient * slowest,
        gathers_beside=device.overlaps and config.prefetch_bucket != 0,
        host_bytes_per_s=host_link.bytes_per_s if to_host else None,
    )


def _wire_bits(wire: WireFormat | None, dtype: str) -> int:
    """Return the bits of an element on the wire, scales left out."""
    return _bits(dtype) if wire is None else wire.bits


def _bits(dtype: str) -> int:
    return 8 * jnp.dtype(dtype).itemsize
