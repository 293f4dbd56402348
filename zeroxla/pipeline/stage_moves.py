"""Moves leaves from the devices that store them to the stages that use them, and gradients back.

If every stage uses the same number of layers of a stacked leaf, the leaf is stored by stage: each
layer on the devices that use it. Such a leaf never moves.

Any other leaf is split over the devices of all stages between steps, as without a pipeline. Once in
a step its parts are brought to the stages that use it. In one exchange over `pipe` each device
sends every stage its parts of that stage's leaves. It then holds the shards that it would store if
there were only the devices of its own stage. Gradients go the same way back. So a stage with heavy
layers holds no more between steps than another, a leaf that several stages share is stored once,
and any optimizer sees whole trees in natural shapes.

Everything here runs inside `shard_map`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import PIPE
from zeroxla.mesh.placement import Placement
from zeroxla.offload.memory_kinds import to_device
from zeroxla.pipeline.leaf_piece import LeafPiece
from zeroxla.pipeline.stage_buffers import Packing, make_packing
from zeroxla.wire.leaves import Leaf

Buffers = list[jax.Array]
"""Arrays of one stage, packed; see `Packing`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafMoves:
    """Moves leaves to the stages and gradients back, in exchanges over `pipe`.

    Attributes:
      num_ranks: the length of the axis `pipe`.
      worlds: the number of devices, of all stages, over which each leaf is split.
      placements: the placements of the model's leaves over all devices.
      frozen: whether each leaf is frozen: no gradient of it goes back.
      pieces: the pieces of leaves that the stages of each rank use.
      packing: packs the parts of a rank's pieces that one device stores.
      gradients: packs the same parts of the gradients.
    """

    num_ranks: int
    worlds: tuple[int, ...]
    placements: tuple[Placement, ...]
    frozen: tuple[bool, ...]
    pieces: tuple[tuple[LeafPiece, ...], ...]
    packing: Packing
    gradients: Packing

    @staticmethod
    def make(
        leaves: Sequence[Leaf],
        pieces: Sequence[Sequence[LeafPiece]],
        *,
        worlds: Sequence[int],
    ) -> LeafMoves:
        """Plan the exchange. Leaves travel in the dtype in which they are stored.

        Args:
          leaves: the model's leaves.
          pieces, worlds: as the attributes.

        Raises:
          ValueError: a leaf is stored by stage, but these stages use other layers of it.
        """
        placements = tuple(leaf.placement for leaf in leaves)
        _check_stored_by_stage(placements, pieces)

        def shapes(*, of_gradients: bool) -> list[list[jax.ShapeDtypeStruct]]:
            return [
                [
                    jax.ShapeDtypeStruct(
                        piece.shape(leaf.placement.part_shape(worlds[piece.leaves[0]])),
                        jnp.uint8 if leaf.is_wire else jnp.float32,
                    )
                    for piece, leaf in ((piece, leaves[piece.leaves[0]]) for piece in mine)
                    if _moves(leaf.placement) and not (of_gradients and leaf.frozen)
                ]
                for mine in pieces
            ]

        return LeafMoves(
            num_ranks=len(pieces),
            worlds=tuple(worlds),
            placements=placements,
            frozen=tuple(leaf.frozen for leaf in leaves),
            pieces=tuple(map(tuple, pieces)),
            packing=make_packing(shapes(of_gradients=False)),
            gradients=make_packing(shapes(of_gradients=True)),
        )

    def to_stages(self, stored: Sequence[jax.Array]) -> Buffers:
        """Send every rank the parts of its pieces.

        Args:
          stored: this device's shards of the model's leaves.

        Returns:
          Each buffer of the packing as [ranks, elements]: the parts that this device's rank needs,
          by the rank that stored them. `leaves` reads them.

        Cost: each device receives (1 - 1/ranks) of its shards of its stages' leaves, in one
        collective for each buffer.
        """
        with jax.named_scope("move"):
            stored = [to_device(x) if _moves(p) else x for x, p in zip(stored, self.placements)]
            sent = [
                self.packing.pack(rank, [p.cut(stored) for p in self._moved(rank)])
                for rank in range(self.num_ranks)
            ]
            return [_exchange(jnp.stack(parts)) for parts in zip(*sent, strict=True)]

    def leaves(self, rank: int, buffers: Buffers, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this device's shards of a rank's pieces.

        Args:
          rank: this device's rank.
          buffers: the result of `to_stages`.
          stored: this device's shards of the model's leaves, for pieces that do not move.
        """
        parts = [self.packing.unpack(rank, [b[k] for b in buffers]) for k in range(self.num_ranks)]
        shards = zip(*parts)
        found = []
        for piece in self.pieces[rank]:
            placement = _of(piece, self.placements)
            if _moves(placement):
                found.append(jnp.concatenate(next(shards), piece.dim_of(placement.split_dim)))
            elif placement.dim is None:
                found.append(piece.cut([to_device(x) for x in stored]))
            else:
                found.append(to_device(stored[piece.leaves[0]]))
        return found

    def packed(self, rank: int, shards: Sequence[jax.Array]) -> Buffers:
        """Pack a rank's shards of the gradients that move, for `from_stages`."""
        cut = [
            jnp.split(x, self.num_ranks, p.dim_of(_of(p, self.placements).split_dim))
            for x, p in zip(shards, self._trained(rank), strict=True)
        ]
        rows = [self.gradients.pack(rank, parts) for parts in zip(*cut)]
        if not rows:
            rows = [self.gradients.zeros()] * self.num_ranks
        return [jnp.stack(parts) for parts in zip(*rows, strict=True)]

    def from_stages(self, buffers: Buffers) -> list[jax.Array | None]:
        """Send gradients back to the devices that store their leaves, and add up a leaf's parts.

        Args:
          buffers: the result of `packed`.

        Returns:
          For each leaf the sum over the ranks, in the shape of this device's shard; None for a
          leaf that does not move, or is frozen.
        """
        with jax.named_scope("move"):
            found = [_exchange(x) for x in buffers]
            leaves: list[jax.Array | None] = [None] * len(self.placements)
            for rank in range(self.num_ranks):
                arrived = self.gradients.unpack(rank, [b[rank] for b in found])
                for piece, x in zip(self._trained(rank), arrived, strict=True):
                    for i in piece.leaves:
                        if leaves[i] is None:
                            shape = self.placements[i].part_shape(self.worlds[i])
                            leaves[i] = jnp.zeros(shape, x.dtype)
                    piece.add_to(leaves, x)
            return leaves

    def _moved(self, rank: int) -> list[LeafPiece]:
        """Return the pieces of a rank that move."""
        return [p for p in self.pieces[rank] if _moves(_of(p, self.placements))]

    def _trained(self, rank: int) -> list[LeafPiece]:
        """Return the pieces of a rank that move and have a gradient."""
        return [p for p in self._moved(rank) if not self.frozen[p.leaves[0]]]


def stage_dims_of(stages: Sequence[Any], leaves: Sequence[Any]) -> dict[int, int]:
    """Return the layer dims of the leaves that can be stored by stage, by the leaf's number.

    Every stage must use the same number of layers of such a leaf, in order.

    Args:
      stages: the stages, each with `pieces`.
      leaves: the model's leaves, or their shapes.
    """
    found: dict[int, list[LeafPiece]] = {}
    for stage in stages:
        for piece in stage.pieces:
            for leaf in piece.leaves:
                found.setdefault(leaf, []).append(piece)
    return {
        leaf: mine[0].dim
        for leaf, mine in found.items()
        if mine[0].dim is not None and _is_even(mine, len(stages), leaves[leaf].shape)
    }


def _is_even(pieces: Sequence[LeafPiece], num_stages: int, shape: Sequence[int]) -> bool:
    """Whether the pieces of a leaf are equal runs of its layers, one for each stage in order."""
    dim = pieces[0].dim
    assert dim is not None
    each, rest = divmod(shape[dim], num_stages)
    layers = [(stage * each, (stage + 1) * each) for stage in range(num_stages)]
    return not rest and all(p.dim == dim for p in pieces) and [p.layers for p in pieces] == layers


def _check_stored_by_stage(
    placements: Sequence[Placement], pieces: Sequence[Sequence[LeafPiece]]
) -> None:
    """Check that the stages use the layers that their devices store.

    Raises:
      ValueError: a stage uses other layers of a leaf that is stored by stage.
    """
    for leaf, placement in enumerate(placements):
        mine = [piece for stage in pieces for piece in stage if leaf in piece.leaves]
        if placement.stage_dim is not None and not (
            [p.dim for p in mine] == [placement.stage_dim] * len(pieces)
            and _is_even(mine, len(pieces), placement.shape)
        ):
            raise ValueError(
                f"a leaf of the shape {placement.shape} is stored by stage, the same number of "
                f"layers on each, and this pipeline's {len(pieces)} stages use "
                f"{[p.layers for p in mine]}; give it the same `partition`, or restore a "
                "checkpoint of the state with this step"
            )


def _of(piece: LeafPiece, placements: Sequence[Placement]) -> Placement:
    """Return the placement of a piece's leaves, which is the same for all of them."""
    return placements[piece.leaves[0]]


def _moves(placement: Placement) -> bool:
    """Whether a leaf moves over `pipe`: it is split, and not stored by stage."""
    return placement.dim is not None and placement.stage_dim is None


def each_rank(num_ranks: int, run: Callable[[int], Any]) -> Any:
    """Return the result of `run(rank)` for this device's rank. All ranks are traced."""
    branches = [lambda r=r: run(r) for r in range(num_ranks)]
    return lax.switch(lax.axis_index(PIPE), branches)


def _exchange(x: jax.Array) -> jax.Array:
    """Send row k to rank k; return the rows that the ranks sent to this one."""
    return lax.all_to_all(x, PIPE, split_axis=0, concat_axis=0, tiled=True)
