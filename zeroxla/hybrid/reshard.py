"""Moves leaves from the training layout to the tensor-parallel one: explicit hops, leaf by leaf.

A leaf is stored split over (device, node), device-major (see `placement`). Here the axis `device`
is seen as `tensor` x `data`, with `tensor` outermost. Gathers over `node` and `data` then leave
each device one contiguous 1/tensor of the stored dim. Stages of a pipeline hold copies of the model
like nodes; a leaf that is stored by stage is first gathered over `pipe`, along its layers. If the
plan splits the same dim in one run, this is the device's part. If the plan splits another dim, an
all-to-all over `tensor` exchanges the two. A device holds a whole leaf only if the stored dim is
padded, or if the plan splits it in several runs or pieces (fused queries, keys and values).

Axes that split the work on one row in training are part of `device` here; see `device_order.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from zeroxla.hybrid.device_order import DeviceOrder
from zeroxla.mesh.axes import DEVICE, NODE, PIPE, axes_size, split_axes
from zeroxla.mesh.placement import Placement
from zeroxla.offload.memory_kinds import to_device
from zeroxla.program.one_by_one import one_after_another
from zeroxla.split.layout import LeafSplit
from zeroxla.split.split_axis import SplitAxis
from zeroxla.step.step import Step

TENSOR = "tensor"
DATA = "data"


def tensor_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """Return a mesh's devices as a mesh (node, tensor, data), or with stages (pipe, node, tensor,
    data), abstract if the given one is.

    Args:
      mesh: the step's mesh. All its axes inside a node are seen as one.
      tensor: the number of devices that share a copy of the model.

    Raises:
      ValueError: `tensor` does not divide a node's devices.
    """
    nodes, devices = mesh.shape[NODE], axes_size(mesh, (DEVICE, *split_axes(mesh)))
    if tensor < 1 or devices % tensor:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        axes = ", ".join(f"{axis}={length}" for axis, length in mesh.shape.items())
        raise ValueError(
            f"tensor={tensor} does not divide the {devices} devices of a node (mesh {axes}); a "
            f"tensor group stays inside a node: use one of {divisors}"
        )
    shape, names = (nodes, tensor, devices // tensor), (NODE, TENSOR, DATA)
    if PIPE in mesh.shape:
        shape, names = (mesh.shape[PIPE], *shape), (PIPE, *names)
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(shape, names, types)
    return Mesh(np.reshape(mesh.devices, shape), names, axis_types=types)


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a tensor mesh over which rows are split, the outermost first."""
    return tuple(axis for axis in (PIPE, NODE, DATA) if axis in mesh.shape)


def rows_spec(mesh: Mesh) -> PartitionSpec:
    """Return how the rows of a batch are split over a tensor mesh."""
    return PartitionSpec(row_axes(mesh))


def number_of_copy(mesh: Mesh) -> jax.Array:
    """Return the number of this device's copy of the model, in the order of the rows; inside
    `shard_map` over the tensor mesh."""
    found = jnp.zeros((), jnp.int32)
    for axis in row_axes(mesh):
        found = found * mesh.shape[axis] + lax.axis_index(axis)
    return found


def stored_spec(placement: Placement) -> PartitionSpec:
    """Return how a stored leaf is split over the mesh of `tensor_mesh`."""
    if placement.dim is None:
        return PartitionSpec()
    names: list[str | tuple[str, ...] | None] = [None] * len(placement.shape)
    names[placement.dim] = (TENSOR, DATA, *placement.axes[1:])
    if placement.stage_dim is not None:
        names[placement.stage_dim] = PIPE
    return PartitionSpec(*names)


def part_spec(row: LeafSplit) -> PartitionSpec:
    """Return how a leaf's tensor-parallel parts are split over the mesh of `tensor_mesh`."""
    return PartitionSpec() if row.dim is None else PartitionSpec(*[None] * row.dim, TENSOR)


def whole_rows(rows: jax.Array, mesh: Mesh) -> jax.Array:
    """Gather rows that are split as `rows_spec` says; inside `shard_map` over the tensor mesh.

    Cost: over `node` a device receives only the rows of its own place in the other nodes; the rest
    comes from inside its node.
    """
    axes, found = row_axes(mesh), rows
    for axis in axes:
        found = lax.all_gather(found, axis)
    order = (*reversed(range(len(axes))), *range(len(axes), found.ndim))
    return jnp.transpose(found, order).reshape(-1, *rows.shape[1:])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredModel:
    """How a training state stores leaves, and how the model's own leaves follow from them.

    Attributes:
      order: the placements of the stored leaves, and the devices' order.
      tree: the tree structure of the stored leaves.
      merge: turns whole stored leaves into the model's own, in float32: it adds adapters and
        dequantizes wires. None means that the stored leaves are the model's own.
    """

    order: DeviceOrder
    tree: Any
    merge: Callable[[Any], Any] | None

    @staticmethod
    def of(step: Step) -> StoredModel:
        """Return how a step's state stores leaves; the step must have seen a batch."""
        state = step.shapes()
        return StoredModel(
            order=DeviceOrder(step.mesh, state.placements[0]),
            tree=jax.tree.structure(state.params),
            merge=step.adapted.merge,
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the leaves that are resharded."""
        return self.order.plain

    def leaves(self, dtype: Any, shapes: Any) -> Any:
        """Return the shapes of the model's own leaves.

        Args:
          dtype: the dtype to give them.
          shapes: the natural shapes of the stored leaves.
        """
        own = shapes if self.merge is None else jax.eval_shape(self.merge, shapes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), own)

    def parts(
        self, shards: Sequence[jax.Array], rows: Sequence[LeafSplit], dtype: Any, mesh: Mesh
    ) -> list[jax.Array]:
        """Return this device's part of each of the model's leaves; inside `shard_map`.

        Args:
          shards: this device's shards of the stored leaves.
          rows: how the plan splits each of the model's leaves.
          dtype: the dtype of the parts.
          mesh: the tensor mesh.

        Cost: a device receives its parts, one leaf after another. If the model has adapters or
        stores wires, it holds one whole leaf at a time.
        """
        merge = self.merge

        def model_leaves(shards: list[jax.Array]) -> list[jax.Array]:
            if merge is None:
                found = [
                    part_of(to_device(x).astype(dtype), placement, row, mesh)
                    for x, placement, row in zip(shards, self.placements, rows, strict=True)
                ]
            else:
                pairs = zip(shards, self.placements, strict=True)
                whole = [whole_of(to_device(x), placement, mesh) for x, placement in pairs]
                merged = jax.tree.leaves(merge(self.tree.unflatten(whole)))
                found = [x.astype(dtype) for x in merged]
            return found

        def finish(i: int, x: jax.Array) -> jax.Array:
            return x if merge is None else _take_own(x, rows[i], mesh.shape[TENSOR])

        with jax.named_scope("reshard"):
            return one_after_another(model_leaves, finish, list(shards))


def whole_of(shard: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Gather a leaf to its natural shape; inside `shard_map` over the tensor mesh."""
    if placement.dim is None:
        return shard
    shard = _over_stages(shard, placement, mesh)
    for axis in (NODE, DATA, TENSOR):
        shard = _gather(shard, axis, placement.dim, mesh)
    return placement.natural(shard)


def part_of(shard: jax.Array, placement: Placement, row: LeafSplit, mesh: Mesh) -> jax.Array:
    """Return this device's part of a leaf; inside `shard_map` over the tensor mesh.

    Cost: a device receives its part once: 1/nodes of it inside its node, the rest from others.
    """
    tensor = mesh.shape[TENSOR]
    if placement.dim is None:
        return _take_own(shard, row, tensor)
    dim, piece = placement.dim, _over_stages(shard, placement, mesh)
    for axis in (NODE, DATA):
        piece = _gather(piece, axis, dim, mesh)
    if row.dim is None or tensor == 1:
        return placement.natural(_gather(piece, TENSOR, dim, mesh))
    if row.dim != dim:
        axes = (SplitAxis(parts=tensor, part=i) for i in range(tensor))
        parts = jnp.concatenate([axis.take(piece, row.dims) for axis in axes], axis=row.dim)
        found = lax.all_to_all(parts, TENSOR, split_axis=row.dim, concat_axis=dim, tiled=True)
        return placement.natural(found)
    if row.is_one_run(tensor) and placement.pad == 0:
        return piece
    return _take_own(placement.natural(_gather(piece, TENSOR, dim, mesh)), row, tensor)


def _over_stages(shard: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Return this device's shard as the devices of one stage alone would store it."""
    if placement.stage_dim is not None:
        return _gather(shard, PIPE, placement.stage_dim, mesh)
    if PIPE in placement.axes:
        return _gather(shard, PIPE, placement.split_dim, mesh)
    return shard


def _gather(piece: jax.Array, axis: str, dim: int, mesh: Mesh) -> jax.Array:
    if mesh.shape[axis] == 1:
        return piece
    return lax.all_gather(piece, axis, axis=dim, tiled=True)


def _take_own(whole: jax.Array, row: LeafSplit, tensor: int) -> jax.Array:
    """Return this device's part of a leaf that it has whole."""
    return SplitAxis(parts=tensor, name=TENSOR).take(whole, row.dims)
