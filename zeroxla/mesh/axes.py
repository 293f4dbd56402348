"""The axes of a mesh: their names, their order, their lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

NODE = "node"
DEVICE = "device"
PIPE = "pipe"
TENSOR = "tensor"
CONTEXT = "context"
EXPERT = "expert"

SPLIT_AXES = (EXPERT, CONTEXT, TENSOR)
"""The axes along which the work on one row is split, in the order of a mesh: devices that are next
to each other share the last."""

# Every leaf and every batch is split over these two axes. A leaf's shards are ordered device-major
# (see wire/collectives.py), a batch's rows node-major, so that a host's rows are contiguous.
LEAF_AXES = (DEVICE, NODE)
BATCH_AXES = (NODE, DEVICE)


def check_is_mesh(mesh: Any) -> None:
    """Check that an argument is a mesh, with or without devices.

    Raises:
      ValueError: it is something else.
    """
    if not hasattr(mesh, "axis_names"):
        raise ValueError(
            f"the mesh is {mesh!r}, a {type(mesh).__name__}; make one with zeroxla.make_mesh()"
        )


def as_auto(mesh: Mesh, *, pipeline: bool = False) -> Mesh:
    """Return `mesh` with Auto axes, and with both axes `node` and `device`: one that is missing is
    added with length 1.

    Args:
      mesh: a mesh of devices; or an `AbstractMesh`, on which steps are traced and described, but
        not run.
      pipeline: whether the model is a pipeline. If not, the axis `pipe` must have length 1.

    Raises:
      ValueError: it is no mesh, the mesh has neither axis, has unknown axes, or has stages for a
        model that is not a pipeline.
    """
    check_is_mesh(mesh)
    names = mesh.axis_names
    missing = [a for a in BATCH_AXES if a not in names]
    unknown = [a for a in names if a not in (PIPE, *BATCH_AXES, *SPLIT_AXES)]
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
    if missing:  # the axis `node` goes right before the axis `device`
        at = names.index(DEVICE) if missing == [NODE] else names.index(NODE) + 1
        names = (*names[:at], missing[0], *names[at:])
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        sizes = tuple(mesh.shape.get(name, 1) for name in names)
        abstract = AbstractMesh(sizes, names, types, abstract_device=mesh.abstract_device)
        return cast(Mesh, abstract)  # it has everything that a trace reads
    devices = mesh.devices if at is None else np.expand_dims(mesh.devices, at)
    return Mesh(devices, names, axis_types=types)


def platform_of(mesh: Mesh) -> str:
    """Return the platform of a mesh's devices: "cpu", "gpu" or "tpu". For an abstract mesh that
    does not name it, return the local devices' platform."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return jax.default_backend() if device is None else device.platform
    return mesh.devices.flat[0].platform


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several devices along which the work on one row is split."""
    return tuple(axis for axis in SPLIT_AXES if mesh.shape.get(axis, 1) > 1)


def lengths_beside(nodes: int, devices_per_node: int, split: Mapping[str, int]) -> tuple[int, int]:
    """Return the lengths of `node` and `device` that axes leave which split the work on one row.

    The axes divide the devices of a node. If they are longer together, they take all devices of
    several nodes, and `node` is what is left of the nodes.

    Args:
      nodes, devices_per_node: the numbers of nodes, and of devices in each.
      split: the lengths of these axes, in the order of a mesh.

    Raises:
      ValueError: they do not divide the devices of a node, nor fill nodes.
    """
    together, fits = 1, True
    for length in reversed(list(split.values())):
        together *= length
        fits = fits and (devices_per_node % together == 0 or together % devices_per_node == 0)
    taken = max(1, together // devices_per_node)
    if fits and nodes % taken == 0:
        return nodes // taken, max(1, devices_per_node // together)
    lengths = " x ".join(f"{name}={length}" for name, length in split.items() if length > 1)
    if fits:
        raise ValueError(
            f"{lengths} are the devices of {taken} nodes, and nodes={nodes} do not divide by "
            f"{taken}; take shorter axes, or other nodes="
        )
    raise ValueError(
        f"{devices_per_node} devices of a node do not divide by {lengths}, whose axes lie "
        "inside a node or fill several; take lengths whose product divides them or is a multiple "
        "of them, or other devices_per_node="
    )


def nodes_along(lengths: Mapping[str, int], devices_per_node: int, axis: str) -> int:
    """Return the number of nodes on which the devices of one group along an axis lie.

    Args:
      lengths: the lengths of a mesh's axes, outermost first.
      devices_per_node: the number of devices of a node.
      axis: the axis; the devices of a group differ in their place along it alone.
    """
    if axis in (PIPE, NODE):
        return lengths[axis]
    names = list(lengths)
    inner = math.prod(lengths[name] for name in names[names.index(axis) + 1 :])
    whole = max(1, inner * lengths[axis] // devices_per_node)
    return whole // max(1, inner // devices_per_node)


def leaf_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which leaves are split, outermost first. They are all axes of the
    mesh."""
    stages = (PIPE,) if mesh.shape.get(PIPE, 1) > 1 else ()
    return (*split_axes(mesh), *LEAF_AXES, *stages)


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Return the number of devices along `axes` together."""
    return math.prod(mesh.shape[axis] for axis in axes)


def world_size(mesh: Mesh) -> int:
    """Return the number of data-parallel devices: nodes x devices per node."""
    return mesh.shape[NODE] * mesh.shape[DEVICE]
