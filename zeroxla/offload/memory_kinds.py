"""Moves arrays between a device's memory and its host's, inside compiled programs."""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax import memory
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from zeroxla.config.offload import PINNED
from zeroxla.offload.disk.disk_array import DiskArray, DiskShape
from zeroxla.program.compat import with_layout
from zeroxla.program.host_values import is_host_type

Place = Literal["device", "host", "disk"]
HOST_KINDS = (PINNED, "unpinned_host")
"""JAX's names for a host's memory."""


def place_of(x: Any) -> Place:
    """Return where an array of a state is, or where the array of a shape with a sharding would
    be."""
    if isinstance(x, (DiskArray, DiskShape)):
        return "disk"
    return "host" if x.sharding.memory_kind in HOST_KINDS else "device"


def is_on_host(x: Any) -> bool:
    """Return whether an array, real or traced, is in host memory."""
    return is_host_type(jax.typeof(x))


def to_device(x: jax.Array) -> jax.Array:
    """Return the array in device memory. It is not moved if it is there already."""
    return jax.device_put(x, memory.Space.Device) if is_on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """Return the array in its host's pinned memory, inside a compiled program. It is not moved if
    it is there already."""
    return x if is_on_host(x) else jax.device_put(x, memory.Space.Host)


def put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array with a sharding, in the sharding's memory, inside a compiled program. It is
    not moved if the sharding is in host memory and the array is there already."""
    if sharding.memory_kind in (None, "device"):
        return with_layout(x, sharding)
    return x if is_on_host(x) else jax.device_put(x, sharding)


def check_memory(mesh: Mesh, kind: str) -> None:
    """Check that a mesh's devices can reach a kind of memory. An abstract mesh passes, and so do
    devices that are only described, for which a program is compiled: they list no memories.

    Raises:
      ValueError: the devices cannot reach it.
    """
    if isinstance(mesh, AbstractMesh):
        return
    device = mesh.devices.flat[0]
    kinds = [m.kind for m in device.addressable_memories()]
    if kinds and kind not in kinds:
        raise ValueError(
            f"Offload needs {kind!r} memory, and {device.device_kind} has {kinds}; leave "
            "`offload` out"
        )
