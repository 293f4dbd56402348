"""`SplitBatch`: a batch of which devices are given parts, along the axes that split work."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zeroxla.mesh.axes import BATCH_AXES
from zeroxla.mesh.placement import AxisPart

BY_ROWS = PartitionSpec(BATCH_AXES)
"""How a batch is split over a mesh along no other axes."""

BatchParts = tuple[tuple[AxisPart, ...], ...]
"""For each array of a batch the parts that a device is given, in the order in which axes are
split."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitBatch:
    """A batch, and the parts of its arrays that a device is given.

    A loss that is split over axes takes this in the place of a batch. So it knows what the arrays
    are parts of.

    Attributes:
      arrays: the batch. Its arrays are global ones outside of `shard_map`, and a device's parts
        inside.
      parts: the parts.
    """

    arrays: Any
    parts: BatchParts = dataclasses.field(metadata={"static": True})

    @staticmethod
    def of_device(rows: Any, parts: BatchParts) -> SplitBatch:
        """Return the shapes that a device is given of some rows, from their whole shapes."""
        return SplitBatch(arrays=_scaled(rows, parts, inwards=True), parts=parts)

    def whole(self) -> Any:
        """Return the shapes that the rows of a device would have whole."""
        return _scaled(self.arrays, self.parts, inwards=False)

    def specs(self) -> Any:
        """Return how each array is split over the mesh, as a pytree like the batch."""
        leaves, tree = jax.tree.flatten(self.arrays)
        pairs = zip(leaves, self.parts, strict=True)
        return tree.unflatten([_spec(x.ndim, parts) for x, parts in pairs])


def specs_of(batch: Any) -> Any:
    """Return the argument `in_specs` of `shard_map` for a batch, which may be a `SplitBatch`."""
    if isinstance(batch, SplitBatch):
        return SplitBatch(arrays=batch.specs(), parts=batch.parts)
    return BY_ROWS


def _spec(ndim: int, parts: tuple[AxisPart, ...]) -> PartitionSpec:
    axes: list[tuple[str, ...]] = [BATCH_AXES, *((),) * (ndim - 1)]
    for part in parts:
        axes[part.dim] = (*axes[part.dim], part.axis)
    while not axes[-1]:
        axes.pop()
    return PartitionSpec(
        *(names if len(names) > 1 else names[0] if names else None for names in axes)
    )


def _scaled(rows: Any, parts: BatchParts, *, inwards: bool) -> Any:
    leaves, tree = jax.tree.flatten(rows)
    found = []
    for x, own in zip(leaves, parts, strict=True):
        shape = list(x.shape)
        for part in own:
            n = shape[part.dim]
            shape[part.dim] = n // part.length if inwards else n * part.length
        found.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype))
    return tree.unflatten(found)
