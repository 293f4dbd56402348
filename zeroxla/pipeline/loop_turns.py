"""Some turns of a loop over blocks: what a stage runs of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.pipeline.line import BlockLoop
from zeroxla.program.stacked_scan import Stacked, loop_body
from zeroxla.program.trace import Operand, Value


@dataclasses.dataclass(frozen=True, slots=True)
class LoopTurns:
    """Some turns of a loop over blocks.

    Attributes:
      loop: the loop.
      first, end: the first turn, and the one after the last.
    """

    loop: BlockLoop
    first: int
    end: int

    @property
    def blocks(self) -> tuple[int, int]:
        """The first block of these turns, and the one after the last."""
        if not self.loop.scan.reverse:
            return self.first, self.end
        return self.loop.scan.length - self.end, self.loop.scan.length - self.first

    @property
    def is_end(self) -> bool:
        """Whether the loop ends with these turns."""
        return self.end == self.loop.scan.length

    @property
    def plain_xs(self) -> list[tuple[int, Operand]]:
        """The sliced operands that are no leaves and no state, by their position."""
        operands = enumerate(self.loop.scan.xs, self.loop.scan.first_x)
        return [(i, a) for i, a in operands if i not in self.loop.stacked]

    def pieces(self, numbers: Mapping[Value, int]) -> dict[int, LeafPiece]:
        """Return what these turns slice of some arrays, by the position of the operand.

        Args:
          numbers: the arrays, with their numbers: the leaves, or the leaves of the model state.
        """
        first, end = self.blocks
        found = {}
        for i, stacked in self.loop.stacked.items():
            if isinstance(stacked, Stacked):
                if stacked.leaf in numbers:
                    found[i] = LeafPiece(
                        leaves=(numbers[stacked.leaf],),
                        dim=stacked.layer_dim,
                        layers=(first, end),
                    )
            elif numbers.keys() >= set(stacked):
                mine = tuple(numbers[v] for v in stacked[first:end])
                found[i] = LeafPiece(leaves=mine, is_stack=True)
        return found

    def run(
        self, consts: Sequence[Any], carry: Sequence[jax.Array], xs: Mapping[int, jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the turns.

        Args:
          consts: the operands that every turn reads whole.
          carry: the carry of the turn before.
          xs: the sliced operands of these blocks, by their position; of a stacked leaf, its layers
            in its own layout.

        Returns:
          The last carry, and what the blocks return, stacked by block.
        """
        scan = self.loop.scan
        chains = {i: x for i, x in self.loop.stacked.items() if isinstance(x, Stacked)}
        body, _ = loop_body(scan, chains)
        xs = {
            i: jnp.moveaxis(x, chains[i].layer_dim, 0) if i in chains else x for i, x in xs.items()
        }

        def turn(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            carry, ys = scan.split_outputs(body(*consts, *carry, *x))
            return list(carry), list(ys)

        ordered = [xs[i] for i in sorted(xs)]
        return scan.run(turn, list(carry), ordered, length=self.end - self.first)
