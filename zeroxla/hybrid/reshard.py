"""From the training layout to the tensor-parallel one: explicit hops, leaf by leaf.

A leaf is stored split over (device, node), device-major (see `placement`). With device = tensor *
data, `tensor` the outer one, hops over `node` and `data` leave each device one contiguous 1/tensor
of that dim, 1/tensor of the leaf. Where the plan splits the same dim in one run, that is its part;
where it splits another dim, an all-to-all over `tensor` exchanges the two. No device holds a whole
leaf, but where a dim is split in several runs (fused queries, keys and values along the stored dim)
or padded.
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

from zeroxla.mesh.axes import DEVICE, NODE
from zeroxla.mesh.placement import Placement
from zeroxla.offload.memory_kinds import to_device
from zeroxla.program.one_by_one import one_after_another
from zeroxla.split.run_parts import padded, part_size, take_part
from zeroxla.split.tensor_plan import LeafSplit
from zeroxla.step.step import Step

TENSOR = "tensor"
DATA = "data"
ROWS = PartitionSpec((NODE, DATA))
"""Of the rows of a batch."""


def tensor_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """Return the same devices as (node, tensor, data); of an abstract mesh, an abstract one.

    Raises:
      ValueError: `tensor` does not divide a node's devices.
    """
    nodes, devices = mesh.shape[NODE], mesh.shape[DEVICE]
    if tensor < 1 or devices % tensor:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ValueError(
            f"tensor={tensor} does not divide the {devices} devices of a node (mesh node={nodes}, "
            f"device={devices}); a tensor group stays inside a node: use one of {divisors}"
        )
    shape, names = (nodes, tensor, devices // tensor), (NODE, TENSOR, DATA)
    if isinstance(mesh, AbstractMesh):
        return mesh.update(shape, names, (AxisType.Auto,) * 3)
    return Mesh(np.reshape(mesh.devices, shape), names, axis_types=(AxisType.Auto,) * 3)


def stored_spec(placement: Placement) -> PartitionSpec:
    """Return how a stored leaf lies on the mesh of `tensor_mesh`."""
    if placement.dim is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * placement.dim, (TENSOR, DATA, NODE))


def part_spec(row: LeafSplit) -> PartitionSpec:
    """Return how a leaf's parts lie on it."""
    return PartitionSpec() if row.dim is None else PartitionSpec(*[None] * row.dim, TENSOR)


def whole_rows(rows: jax.Array, mesh: Mesh) -> jax.Array:
    """Return rows that are split over (node, data), whole; inside `shard_map` over that mesh.

    Cost: from other nodes a device receives what only it asks for, the rest inside its node.
    """
    nodes, data = mesh.shape[NODE], mesh.shape[DATA]
    found = lax.all_gather(lax.all_gather(rows, NODE), DATA)
    return jnp.swapaxes(found, 0, 1).reshape(nodes * data * rows.shape[0], *rows.shape[1:])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredModel:
    """The leaves of a training state, and the model's own leaves that they stand for.

    Attributes:
      placements: of the stored leaves.
      tree: of them.
      merge: turns them, whole, into the model's own, in float32: adapters added, wires dequantized;
        None where they are the model's own.
    """

    placements: tuple[Placement, ...]
    tree: Any
    merge: Callable[[Any], Any] | None

    @staticmethod
    def of(step: Step) -> StoredModel:
        """Take them from a step, which has seen a batch."""
        state = step.shapes()
        return StoredModel(
            placements=state.placements[0],
            tree=jax.tree.structure(state.params),
            merge=step.adapted.merge,
        )

    def leaves(self, dtype: Any, shapes: Any) -> Any:
        """Return the shapes of the model's own leaves in a dtype, of those of the stored ones."""
        own = shapes if self.merge is None else jax.eval_shape(self.merge, shapes)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), own)

    def parts(
        self, shards: Sequence[jax.Array], rows: Sequence[LeafSplit], dtype: Any, mesh: Mesh
    ) -> list[jax.Array]:
        """Return this device's part of each of the model's leaves; inside `shard_map`.

        Cost: one leaf after another, a device receives its part; of a model with adapters, or with
        wires at rest, all of a leaf for a moment.
        """
        merge = self.merge

        def own(shards: list[jax.Array]) -> list[jax.Array]:
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
            return x if merge is None else _own(x, rows[i], mesh.shape[TENSOR])

        with jax.named_scope("reshard"):
            return one_after_another(own, finish, list(shards))


def whole_of(shard: jax.Array, placement: Placement, mesh: Mesh) -> jax.Array:
    """Return a leaf whole, in its natural shape; inside `shard_map` over the tensor mesh."""
    if placement.dim is None:
        return shard
    for axis in (NODE, DATA, TENSOR):
        shard = _gather(shard, axis, placement.dim, mesh)
    return placement.natural(shard)


def part_of(shard: jax.Array, placement: Placement, row: LeafSplit, mesh: Mesh) -> jax.Array:
    """Return this device's part of a leaf; inside `shard_map` over the tensor mesh.

    Cost: a device receives its part once, 1/nodes of it inside the node and the rest from others.
    """
    tensor = mesh.shape[TENSOR]
    if placement.dim is None:
        return _own(shard, row, tensor)
    dim, piece = placement.dim, shard
    for axis in (NODE, DATA):
        piece = _gather(piece, axis, dim, mesh)
    if row.dim is None or row.factors is None or tensor == 1:
        return placement.natural(_gather(piece, TENSOR, dim, mesh))
    outer, size, inner = row.factors
    if row.dim != dim:
        shape = piece.shape
        d = row.dim
        apart = piece.reshape(*shape[:d], outer, size, inner, *shape[d + 1 :])
        apart = padded(apart, d + 1, tensor * part_size(size, tensor))
        at = dim if dim < d else dim + 2
        found = lax.all_to_all(apart, TENSOR, split_axis=d + 1, concat_axis=at, tiled=True)
        joined = outer * part_size(size, tensor) * inner
        found = found.reshape(*found.shape[:d], joined, *found.shape[d + 3 :])
        return placement.natural(found)
    if outer == 1 and placement.pad == 0:
        return piece
    return _own(placement.natural(_gather(piece, TENSOR, dim, mesh)), row, tensor)


def _gather(piece: jax.Array, axis: str, dim: int, mesh: Mesh) -> jax.Array:
    if mesh.shape[axis] == 1:
        return piece
    return lax.all_gather(piece, axis, axis=dim, tiled=True)


def _own(whole: jax.Array, row: LeafSplit, tensor: int) -> jax.Array:
    if row.dim is None or row.factors is None or tensor == 1:
        return whole
    mine = part_size(row.factors[1], tensor)
    return take_part(whole, row.dim, row.factors, mine, tensor, lax.axis_index(TENSOR))
