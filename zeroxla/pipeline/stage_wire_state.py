"""The wire state of a pipeline: each rank's devices remember something about their own leaves.

Ranks have pieces of different leaves, so the arrays of every rank are packed into buffers of the
same length. The cut into stages says which array lies where.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.mesh.placement import Placement
from zeroxla.pipeline.rank_leaves import RankLeaves
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.pipeline.stage_moves import LeafMoves, each_rank
from zeroxla.program.paths import Path
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring
from zeroxla.wire.wire_state import PARTS, WholeWireStatePlan, WireState, WireStatePlan, in_words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StagesWireState(WireState):
    """The wire state of a pipeline, in lists of packed buffers.

    Attributes:
      copies: the kept copies of every rank, [ranks, devices, elements], the same on all nodes of a
        rank.
      errors: the kept errors of every rank, uint8[ranks, nodes, devices, bytes].
      boundaries: the boundaries of the stages.
      ranks: the rank of each stage.
      inside: the axes inside a node, over whose devices the buffers are split.
    """

    boundaries: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    ranks: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    inside: tuple[str, ...] = dataclasses.field(default=(DEVICE,), metadata={"static": True})

    def specs(self, placements: Sequence[Placement]) -> WireState:
        """Return how the buffers are split over the mesh."""
        copies = [PartitionSpec(PIPE, self.inside)] * len(self.copies)
        errors = [PartitionSpec(PIPE, NODE, self.inside)] * len(self.errors)
        return dataclasses.replace(self, copies=copies, errors=errors)

    def names(self, leaves: Sequence[Path]) -> WireState:
        """Return the buffers' names in a checkpoint; the cut is part of each name, and the parts
        of the leaves are."""
        cut = "stages " + " ".join(map(str, self.boundaries))
        if self.ranks != tuple(range(len(self.ranks))):
            cut += " on ranks " + " ".join(map(str, self.ranks))
        if self.inside != (DEVICE,):
            parts = hashlib.sha256(repr([in_words(own) for own in self.parts]).encode())
            cut += f" over {' '.join(self.inside)}, parts {parts.hexdigest()[:16]}"
        parts = {
            part: [(part, cut, str(i)) for i in range(len(getattr(self, part)))] for part in PARTS
        }
        return dataclasses.replace(self, **parts)

    def shapes(self, placements: Sequence[Placement]) -> WireState:
        """Return the shapes of the buffers."""
        parts = {part: [x.shape for x in getattr(self, part)] for part in PARTS}
        return dataclasses.replace(self, **parts)

    def _fits(self, other: WireState, part: str) -> bool:
        return (
            isinstance(other, StagesWireState)
            and (other.boundaries, other.ranks) == (self.boundaries, self.ranks)
            and other.inside == self.inside
            and WireState._fits(self, other, part)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StagesWireStatePlan(WireStatePlan):
    """Makes the wire state of a pipeline, and packs and unpacks it for a rank.

    Attributes:
      held: the leaves of each rank.
      moves: moves leaves to the stages.
      wiring: how leaves travel between the devices of a stage.
      boundaries: the boundaries of the stages.
      copies, errors: pack the kept copies, and the kept errors.
    """

    held: RankLeaves
    moves: LeafMoves
    wiring: Wiring
    boundaries: tuple[int, ...]
    copies: Packing
    errors: Packing

    @staticmethod
    def make(
        held: RankLeaves, moves: LeafMoves, wiring: Wiring, boundaries: tuple[int, ...]
    ) -> StagesWireStatePlan:
        """Plan the buffers; the arguments are the attributes."""
        shapes = [
            WholeWireStatePlan(layout=layout, wiring=wiring).local_shapes()
            for layout in held.layouts
        ]
        return StagesWireStatePlan(
            held=held,
            moves=moves,
            wiring=wiring,
            boundaries=boundaries,
            copies=make_packing([jax.tree.leaves(mine.copies) for mine in shapes]),
            errors=make_packing([jax.tree.leaves(mine.errors) for mine in shapes]),
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each rank's leaves."""
        return self.held.layouts

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered."""
        return all(self.of_rank(rank).is_empty for rank in range(len(self.layouts)))

    def of_rank(self, rank: int) -> WholeWireStatePlan:
        """Return the plan of one rank's wire state, not packed."""
        return WholeWireStatePlan(layout=self.layouts[rank], wiring=self.wiring)

    def specs(self) -> WireState | None:
        """Return how the wire state is split over the mesh; None if there is none."""
        if self.is_empty:
            return None
        return self._state(list(self.copies.buffers), list(self.errors.buffers)).specs(())

    def start(self, shards: Sequence[jax.Array]) -> WireState:
        """Make the wire state of a training that begins, or that goes on with other wires.

        It runs inside `shard_map`.

        Args:
          shards: this device's shards of the model's leaves.

        Cost: leaves move to their stages once; the rest is as in a model without stages.
        """
        received = self.moves.to_stages(shards)

        def run(rank: int) -> WireState:
            mine = self.moves.leaves(rank, received, shards)
            return self.pack(rank, self.of_rank(rank).start(mine))

        return each_rank(len(self.layouts), run)

    def pack(self, rank: int, wires: WireState) -> WireState:
        """Pack the wire state of one device of a rank into its part of the buffers."""
        copies = self.copies.pack(rank, jax.tree.leaves(wires.copies))
        errors = self.errors.pack(rank, jax.tree.leaves(wires.errors))
        return self._state([x[None, None] for x in copies], [x[None, None, None] for x in errors])

    def unpack(self, rank: int, wires: WireState) -> WireState:
        """Return the wire state of one device of a rank, from its part of the buffers."""
        plan = self.of_rank(rank)
        parts: dict[str, list[jax.Array | None]] = {}
        for part, packing, mine in (
            ("copies", self.copies, plan.copied),
            ("errors", self.errors, plan.corrected),
        ):
            buffers = [x.reshape(-1) for x in getattr(wires, part)]
            found = dict(zip(mine, packing.unpack(rank, buffers), strict=True))
            parts[part] = [found.get(i) for i in range(len(self.layouts[rank].leaves))]
        return WireState(copies=parts["copies"], errors=parts["errors"])

    def _state(self, copies: list[Any], errors: list[Any]) -> StagesWireState:
        return StagesWireState(
            copies=copies,
            errors=errors,
            boundaries=self.boundaries,
            ranks=self.held.ranks,
            inside=self.wiring.collectives.hops.all_inside,
        )
