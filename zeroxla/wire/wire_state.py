"""Wire state: kept copies of weights and errors of gradients that wires need in the next step.

Every list here has one entry per leaf of the model. An entry is None if the leaf has no such array.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zeroxla.mesh.axes import NODE, PIPE
from zeroxla.mesh.placement import AxisPart, Placement
from zeroxla.program.paths import Path
from zeroxla.wire.hops import from_bits
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.routes import LeafSource, Route

Arrays = list[Any]  # arrays, or None
Parts = tuple[tuple[AxisPart, ...], ...]
"""The parts of each leaf."""
PARTS = ("copies", "errors")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WireState:
    """The arrays that wires keep between steps, in lists with one entry per leaf.

    Attributes:
      copies: a copy of each leaf as gathers have sent it, in the compute dtype and the stored
        shape, split over `device` and the same on all nodes.
      errors: the rounding errors of its gradient on the hop over `node`, as wires: uint8[nodes,
        devices, nodes, bytes], split over the first two dims.
      parts: the parts of each leaf along axes that split the work on one row; () if no axis splits
        any. What is kept of such a leaf is kept of its parts: a copy has them one after another.
    """

    copies: Arrays
    errors: Arrays
    parts: Parts = dataclasses.field(default=(), metadata={"static": True})

    def specs(self, placements: Sequence[Placement]) -> WireState:
        """Return how the arrays are split, from the placements of the leaves."""
        own = self.parts or ((),) * len(placements)
        copies = [
            None if x is None else _copy_spec(p.of_part, parts)
            for x, p, parts in zip(self.copies, placements, own, strict=True)
        ]
        errors = [
            None
            if x is None
            else PartitionSpec(NODE, (*_inside(p.of_part), *(part.axis for part in parts)))
            for x, p, parts in zip(self.errors, placements, own, strict=True)
        ]
        return dataclasses.replace(self, copies=copies, errors=errors)

    def names(self, leaves: Sequence[Path]) -> WireState:
        """Return the names of the arrays in a checkpoint, from the parameters' names. What is kept
        of parts has the parts in its name."""
        ends = [(in_words(own),) if own else () for own in self.parts] or [()] * len(leaves)
        parts = {
            part: [
                None if x is None else (part, *name, *end)
                for x, name, end in zip(getattr(self, part), leaves, ends, strict=True)
            ]
            for part in PARTS
        }
        return dataclasses.replace(self, **parts)

    def shapes(self, placements: Sequence[Placement]) -> WireState:
        """Return the natural shapes of the arrays."""
        own = self.parts or ((),) * len(placements)
        copies = [
            None if x is None else x.shape if parts else p.shape
            for x, p, parts in zip(self.copies, placements, own, strict=True)
        ]
        errors = [None if x is None else x.shape for x in self.errors]
        return dataclasses.replace(self, copies=copies, errors=errors)

    def keeping(self, old: WireState | None) -> WireState:
        """Return this wire state with the copies and the errors of `old`, each if they fit."""
        parts = {
            part: getattr(old, part) for part in PARTS if old is not None and self._fits(old, part)
        }
        return dataclasses.replace(self, **parts)

    def fits(self, other: WireState | None) -> bool:
        """Return whether both have arrays of the same shapes and dtypes."""
        return other is not None and all(self._fits(other, part) for part in PARTS)

    def with_copies(self, new: Mapping[int, jax.Array]) -> WireState:
        """Return this wire state with new copies of some leaves, by their numbers."""
        copies = [new.get(i, x) for i, x in enumerate(self.copies)]
        return dataclasses.replace(self, copies=copies)

    def _fits(self, other: WireState, part: str) -> bool:
        a, b = getattr(self, part), getattr(other, part)
        if type(self) is not type(other) or jax.tree.structure(a) != jax.tree.structure(b):
            return False
        if self.parts != other.parts:
            return False
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)


class WireStatePlan(abc.ABC):
    """Says which leaves have wire state, and makes it."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def is_empty(self) -> bool:
        """Whether no leaf has wire state."""

    @abc.abstractmethod
    def specs(self) -> WireState | None:
        """Return how the wire state is split over the mesh; None if there is none."""

    @abc.abstractmethod
    def start(self, shards: Sequence[jax.Array]) -> WireState:
        """Make the wire state of a training that begins, or goes on with other wires.

        It runs inside `shard_map`.

        Args:
          shards: this device's stored shards of the model's leaves.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeWireStatePlan(WireStatePlan):
    """Makes the wire state of a model without stages.

    Attributes:
      layout: the model's leaves.
      wiring: the resolved options of wires.
    """

    layout: Layout
    wiring: Wiring

    @property
    def copied(self) -> list[int]:
        """Numbers of the leaves that have a kept copy."""
        keeps = self.wiring.differences is not None
        return [i for i, leaf in enumerate(self.layout) if keeps and leaf.quantized]

    @property
    def corrected(self) -> list[int]:
        """Numbers of the leaves whose gradient's error is kept."""
        keeps = self.wiring.feedback is not None
        return [
            i for i, leaf in enumerate(self.layout) if keeps and leaf.quantized and not leaf.frozen
        ]

    @property
    def is_empty(self) -> bool:
        """Whether no leaf has wire state."""
        return not self.copied and not self.corrected

    def specs(self) -> WireState | None:
        """Return how the wire state is split; None if there is none."""
        if self.is_empty:
            return None
        parts = [
            [True if i in mine else None for i in range(len(self.layout.leaves))]
            for mine in (self.copied, self.corrected)
        ]
        return WireState(copies=parts[0], errors=parts[1]).specs(self.layout.placements)

    def local_shapes(self) -> WireState:
        """Return the shapes of one device's part of the wire state."""
        copies, errors = self._nones(), self._nones()
        collectives, feedback = self.wiring.collectives, self.wiring.feedback
        for i in self.copied:
            placement = self.layout.leaves[i].placement
            shape = placement.part_shape(collectives.hops.over(placement.axes).devices)
            copies[i] = jax.ShapeDtypeStruct(shape, collectives.compute_dtype)
        for i in self.corrected:
            assert feedback is not None
            placement = self.layout.leaves[i].placement
            world = collectives.hops.over(placement.axes).world
            size = math.prod(placement.part_shape(world))
            shape = (1, 1, collectives.hops.nodes, feedback.num_bytes(size))
            errors[i] = jax.ShapeDtypeStruct(shape, jnp.uint8)
        return WireState(copies=copies, errors=errors)

    def start(self, shards: Sequence[jax.Array]) -> WireState:
        """Make the wire state of a training that begins, or goes on with other wires.

        It runs inside `shard_map`. Errors begin at zero; the copies are gathered unquantized.

        Cost: the outer hops of a gather of the copied leaves in the compute dtype.
        """
        copies, shapes = self._nones(), self.local_shapes()
        gathers = self.wiring.collectives.gathers
        exact = dataclasses.replace(gathers, wire_dtype=gathers.compute_dtype)
        found = exact.secondary(
            [LeafSource.stored(shards[i]) for i in self.copied],
            [
                Route(placement=self.layout.leaves[i].placement, secondary="wire")
                for i in self.copied
            ],
        )
        for i, piece in zip(self.copied, found, strict=True):
            copies[i] = from_bits(piece.array, gathers.compute_dtype)
        errors = [None if x is None else jnp.zeros(x.shape, x.dtype) for x in shapes.errors]
        return WireState(copies=copies, errors=errors)

    def _nones(self) -> list[Any]:
        return [None] * len(self.layout.leaves)


def in_words(parts: Sequence[AxisPart]) -> str:
    """Return the parts of a leaf as a text that is equal for equal parts."""
    pieces = ["+".join(str(p).replace(" ", "") for p in part.pieces) for part in parts]
    return ", ".join(
        f"{part.axis} {part.length} dim {part.dim} {text}"
        for part, text in zip(parts, pieces, strict=True)
    )


def _inside(placement: Placement) -> tuple[str, ...]:
    """Return the axes inside a node over which a leaf is split."""
    return tuple(axis for axis in placement.axes if axis not in (NODE, PIPE))


def _copy_spec(placement: Placement, parts: Sequence[AxisPart]) -> PartitionSpec:
    """Return how the copies of a leaf's parts are split, of which each device has a part of one."""
    names: list[tuple[str, ...] | None] = [None] * len(placement.shape)
    names[placement.split_dim] = _inside(placement)
    for part in parts:
        names[part.dim] = (*(names[part.dim] or ()), part.axis)
    return PartitionSpec(*names)
