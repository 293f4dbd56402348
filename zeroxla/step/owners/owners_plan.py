"""`OwnersPlan`: which matrices of an update have owners; it runs the update with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from zeroxla.mesh.placement import Placement
from zeroxla.program.trace import Program, Value, run
from zeroxla.step.owners.groups import OwnedGroup, group_of, joined_groups
from zeroxla.step.owners.matrix_pieces import CutProgram, MatrixPiece, matrix_pieces
from zeroxla.step.owners.owners_turn import OwnersTurn
from zeroxla.step.owners.spread import placed_values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnersPlan:
    """An update whose matrices have owners.

    Attributes:
      cut: the update.
      turns: the pieces of each turn: exchanges that do not wait for each other.
    """

    cut: CutProgram
    turns: tuple[tuple[OwnersTurn, ...], ...]

    @staticmethod
    def of(program: Program, known: Mapping[Value, Placement], mesh: Mesh) -> OwnersPlan | None:
        """Give the matrices of an update owners.

        Args:
          program: the update.
          known: how those of its inputs are stored that are split.
          mesh: the mesh.

        Returns:
          None if owners would save nothing: no equation needs a matrix whole that devices have in
          parts, there is one device, or one matrix.

        Cost: nothing runs; a minimum cut for each matrix.
        """
        cut = matrix_pieces(program)
        if mesh.size == 1 or not cut.pieces:
            return None
        groups = _groups(cut, known, mesh)
        while len(groups) < len(cut.pieces):  # The others are left to XLA.
            cut = cut.only(groups)
            groups = _groups(cut, known, mesh)
        if sum(group.num_matrices * group.num_stages for group in groups.values()) < 2:
            return None
        turns = [
            tuple(
                OwnersTurn.of(joined_groups([g for g in mine if g.axes == axes]), mesh)
                for axes in dict.fromkeys(group.axes for group in mine)
            )
            for _, pieces in cut.turns
            for mine in [[groups[piece] for piece in pieces]]
        ]
        return OwnersPlan(cut=cut, turns=tuple(turns))

    def run(self, env: dict[Value, Any]) -> None:
        """Run the update: add its values to `env`, which has its inputs."""
        for (before, _), turns in zip(self.cut.turns, self.turns, strict=True):
            run(before, env)
            for turn in turns:
                turn.run(env)

    @property
    def groups(self) -> list[OwnedGroup]:
        """All groups, in order."""
        return [group for turns in self.turns for turn in turns for group in turn.groups]

    @property
    def flops(self) -> float:
        """The FLOPs of all matrices."""
        return sum(g.flops * g.num_matrices * g.num_stages for g in self.groups)

    @property
    def device_flops(self) -> float:
        """The FLOPs of the device with the most."""
        return sum(turn.busiest for turns in self.turns for turn in turns)

    @property
    def received_bytes(self) -> int:
        """The bytes that a device receives from others."""
        travels = [t for turns in self.turns for turn in turns for t in (turn.there, turn.back)]
        return sum(travel.received_bytes for travel in travels)


def _groups(
    cut: CutProgram, known: Mapping[Value, Placement], mesh: Mesh
) -> dict[MatrixPiece, OwnedGroup]:
    """Return a group for each piece that owners help with."""
    placed = placed_values(cut, known, mesh)
    found = {piece: group_of(piece, placed, mesh) for piece in cut.pieces}
    return {piece: group for piece, group in found.items() if group is not None}
