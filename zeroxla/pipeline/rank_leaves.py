"""Which leaves the devices of each rank hold for their stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax

from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.wire.leaves import Layout, Leaf


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankLeaves:
    """The leaves that the devices of each rank hold for their stages.

    A piece that several stages of a rank use is held once.

    Attributes:
      ranks: the rank of each stage.
      pieces: for each rank, the pieces of leaves that its stages use.
      layouts: for each rank, the same pieces as leaves.
      numbers: for each stage, the numbers of its pieces among those of its rank.
    """

    ranks: tuple[int, ...]
    pieces: tuple[tuple[LeafPiece, ...], ...]
    layouts: tuple[Layout, ...]
    numbers: tuple[tuple[int, ...], ...]

    @staticmethod
    def make(
        ranks: Sequence[int],
        pieces: Sequence[Sequence[LeafPiece]],
        leaf_of: Callable[[LeafPiece], Leaf],
    ) -> RankLeaves:
        """Collect the leaves of each rank.

        Args:
          ranks: the rank of each stage.
          pieces: the pieces that each stage uses.
          leaf_of: returns a piece as a leaf, placed on the devices of one rank.
        """
        held: list[dict[LeafPiece, int]] = [{} for _ in range(max(ranks) + 1)]
        numbers = []
        for rank, mine in zip(ranks, pieces, strict=True):
            known = held[rank]
            numbers.append(tuple(known.setdefault(piece, len(known)) for piece in mine))
        return RankLeaves(
            ranks=tuple(ranks),
            pieces=tuple(tuple(known) for known in held),
            layouts=tuple(_layout(leaf_of(piece) for piece in known) for known in held),
            numbers=tuple(numbers),
        )

    def layout_of(self, stage: int) -> Layout:
        """Return the layout of a stage's own leaves."""
        leaves = self.layouts[self.ranks[stage]].leaves
        return _layout(leaves[i] for i in self.numbers[stage])

    def positions(self, stage: int, *, fetched: bool) -> list[int]:
        """Return where a stage's leaves are among its rank's that are fetched, or resident."""
        here = self.layouts[self.ranks[stage]].indices(fetched=fetched)
        place = {i: position for position, i in enumerate(here)}
        return [place[i] for i in self.numbers[stage] if i in place]

    def trained(self, stage: int) -> list[int]:
        """Return where the gradients of a stage's leaves are among those of its rank. Gradients of
        fetched leaves come first, then those of resident ones; frozen leaves have none."""
        layout = self.layouts[self.ranks[stage]]
        order = [*layout.indices(fetched=True), *layout.indices(fetched=False)]
        trained = [i for i in order if not layout.leaves[i].frozen]
        place = {i: position for position, i in enumerate(trained)}
        mine = self.numbers[stage]
        own = sorted(mine, key=lambda i: not layout.leaves[i].fetched)
        return [place[i] for i in own if i in place]


def _layout(leaves: Iterable[Leaf]) -> Layout:
    found = list(leaves)
    return Layout(tree=jax.tree.structure(found), leaves=tuple(found))
