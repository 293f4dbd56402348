"""The axes of a mesh: their names, their order, their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

NODE = "node"
DEVICE = "device"
PIPE = "pipe"

# Every leaf and every batch is split over these two; the order of a leaf's shards is device-major
# (see collectives.py), the order of a batch's rows is node-major (a host's rows are contiguous).
LEAF_AXES = (DEVICE, NODE)
BATCH_AXES = (NODE, DEVICE)


def as_auto(mesh: Mesh, *, pipeline: bool = False) -> Mesh:
    """Return `mesh` with Auto axes; of the axes `node` and `device` one that is not there has the
    length 1.

    Args:
      mesh: of devices; or an `AbstractMesh`, on which steps are traced and described, but not run.
      pipeline: whether the model is one; otherwise the axis `pipe` must have the length 1.

    Raises:
      ValueError: neither is there, there are unknown ones, or stages for a model without layers.
    """
    names = mesh.axis_names
    missing = [a for a in BATCH_AXES if a not in names]
    unknown = [a for a in names if a not in (PIPE, *BATCH_AXES)]
    if len(missing) == 2 or unknown:
        raise ValueError(
            f"the mesh has the axes {tuple(names)} and needs {BATCH_AXES}"
            f"{f'; unknown: {unknown}' if unknown else ''}; make it with zeroxla.make_mesh(), or "
            f'name the axis between hosts "node" and the axis inside a host "device"'
        )
    stages = mesh.shape.get(PIPE, 1)
    if stages > 1 and not pipeline:
        raise ValueError(
            f"the mesh has pipe={stages} and the model is not a pipeline; make it one with "
            "zeroxla.Pipeline, or use make_mesh(pipe=1)"
        )
    at = None
    if missing:  # next to the other: a node outside of its devices
        at = names.index(DEVICE) if missing == [NODE] else names.index(NODE) + 1
        names = (*names[:at], missing[0], *names[at:])
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        sizes = tuple(mesh.shape.get(name, 1) for name in names)
        abstract = AbstractMesh(sizes, names, types, abstract_device=mesh.abstract_device)
        return cast(Mesh, abstract)  # which has all that a trace reads
    devices = mesh.devices if at is None else np.expand_dims(mesh.devices, at)
    return Mesh(devices, names, axis_types=types)


def platform_of(mesh: Mesh) -> str:
    """Return what kind of device a mesh is of: "cpu", "gpu", "tpu"; of an abstract mesh that does
    not say, the local one's."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return jax.default_backend() if device is None else device.platform
    return mesh.devices.flat[0].platform


def leaf_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which leaves are split, outermost first: all of the mesh."""
    return (*LEAF_AXES, PIPE) if mesh.shape.get(PIPE, 1) > 1 else LEAF_AXES


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of devices along axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def world_size(mesh: Mesh) -> int:
    """Return the number of data-parallel devices, nodes x devices per node."""
    return mesh.shape[NODE] * mesh.shape[DEVICE]
