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
from zeroxla.pipeline.stage_buffers import Packing, make_packing

Buffers = list[jax.Array]
"""Arrays of one stage, packed; see `Packing`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafPiece:
    """The piece of a leaf that a stage uses: the whole leaf, or some of its layers.

    Attributes:
      leaf: the number of the leaf in the model.
      dim: the layer dim; None if the piece is the whole leaf.
      layers: the first layer of the piece, and the one after its last.
    """

    leaf: int
    dim: int | None = None
    layers: tuple[int, int] = (0, 0)

    def cut(self, x: jax.Array) -> jax.Array:
        """Return the piece of a whole leaf, or of a shard of it."""
        return x if self.dim is None else lax.slice_in_dim(x, *self.layers, axis=self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the piece of an array of the shape `whole`."""
        count = self.layers[1] - self.layers[0]
        return tuple(count if d == self.dim else n for d, n in enumerate(whole))

    def add_to(self, whole: jax.Array, x: jax.Array) -> jax.Array:
        """Return `whole` with the piece `x` added in its place."""
        if self.dim is None:
            return whole + x
        at = (slice(None),) * self.dim + (slice(*self.layers),)
        return whole.at[at].add(x)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafMoves:
    """Moves leaves to the stages and gradients back, in exchanges over `pipe`.

    Attributes:
      num_stages: the number of stages, the length of the axis `pipe`.
      world: the number of devices of all stages.
      placements: the placements of the model's leaves over all devices.
      pieces: the pieces of leaves that each stage uses.
      packing: packs the parts of a stage's pieces that one device stores.
    """

    num_stages: int
    world: int
    placements: tuple[Placement, ...]
    pieces: tuple[tuple[LeafPiece, ...], ...]
    packing: Packing

    @staticmethod
    def make(
        placements: Sequence[Placement],
        pieces: Sequence[Sequence[LeafPiece]],
        *,
        world: int,
        dtype: jnp.dtype,
    ) -> LeafMoves:
        """Plan the exchange.

        Args:
          placements, pieces, world: as the attributes.
          dtype: the dtype in which leaves travel.

        Raises:
          ValueError: a leaf is stored by stage, but these stages use other layers of it.
        """
        _check_stored_by_stage(placements, pieces)
        shapes = [
            [
                jax.ShapeDtypeStruct(piece.shape(placements[piece.leaf].part_shape(world)), dtype)
                for piece in mine
                if _moves(placements[piece.leaf])
            ]
            for mine in pieces
        ]
        return LeafMoves(
            num_stages=len(pieces),
            world=world,
            placements=tuple(placements),
            pieces=tuple(map(tuple, pieces)),
            packing=make_packing(shapes),
        )

    def to_stages(self, stored: Sequence[jax.Array]) -> Buffers:
        """Send every stage the parts of its pieces.

        Args:
          stored: this device's shards of the model's leaves.

        Returns:
          Each buffer of the packing as [stages, elements]: the parts that this device's stage
          needs, by the stage that stored them. `leaves` reads them.

        Cost: each device receives (1 - 1/stages) of its shards of its stage's leaves, in one
        collective for each buffer.
        """
        with jax.named_scope("move"):
            sent = [
                self.packing.pack(stage, [p.cut(stored[p.leaf]) for p in self._moved(stage)])
                for stage in range(self.num_stages)
            ]
            return [_exchange(jnp.stack(parts)) for parts in zip(*sent, strict=True)]

    def leaves(self, stage: int, buffers: Buffers, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this device's shards of a stage's pieces.

        Args:
          stage: this device's stage.
          buffers: the result of `to_stages`.
          stored: this device's shards of the model's leaves, for pieces that do not move.
        """
        parts = [
            self.packing.unpack(stage, [b[k] for b in buffers]) for k in range(self.num_stages)
        ]
        shards = zip(*parts)
        found = []
        for piece in self.pieces[stage]:
            placement = self.placements[piece.leaf]
            if _moves(placement):
                found.append(jnp.concatenate(next(shards), placement.dim))
            else:
                x = stored[piece.leaf]
                found.append(piece.cut(x) if placement.dim is None else x)
        return found

    def packed(self, stage: int, shards: Sequence[jax.Array]) -> Buffers:
        """Pack a stage's shards of the pieces that move, for `from_stages`."""
        cut = [
            jnp.split(x, self.num_stages, self.placements[p.leaf].split_dim)
            for x, p in zip(shards, self._moved(stage), strict=True)
        ]
        rows = [self.packing.pack(stage, parts) for parts in zip(*cut)]
        if not rows:
            rows = [self.packing.zeros()] * self.num_stages
        return [jnp.stack(parts) for parts in zip(*rows, strict=True)]

    def from_stages(self, buffers: Buffers) -> list[jax.Array | None]:
        """Send every part back to the device that stores it, and add up a leaf's parts.

        Args:
          buffers: the result of `packed`.

        Returns:
          For each leaf the sum over the stages, in the shape of this device's shard; None for a
          leaf that does not move.
        """
        with jax.named_scope("move"):
            found = [_exchange(x) for x in buffers]
            leaves: list[jax.Array | None] = [None] * len(self.placements)
            for stage in range(self.num_stages):
                arrived = self.packing.unpack(stage, [b[stage] for b in found])
                for piece, x in zip(self._moved(stage), arrived, strict=True):
                    whole = leaves[piece.leaf]
                    if whole is None:
                        shape = self.placements[piece.leaf].part_shape(self.world)
                        whole = jnp.zeros(shape, x.dtype)
                    leaves[piece.leaf] = piece.add_to(whole, x)
            return leaves

    def _moved(self, stage: int) -> list[LeafPiece]:
        """Return the pieces of a stage that move."""
        return [p for p in self.pieces[stage] if _moves(self.placements[p.leaf])]


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
            found.setdefault(piece.leaf, []).append(piece)
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
        mine = [piece for stage in pieces for piece in stage if piece.leaf == leaf]
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


def _moves(placement: Placement) -> bool:
    """Whether a leaf moves over `pipe`: it is split, and not stored by stage."""
    return placement.dim is not None and placement.stage_dim is None


def each_stage(num_stages: int, run: Callable[[int], Any]) -> Any:
    """Return the result of `run(stage)` for this device's stage. All stages are traced."""
    branches = [lambda s=s: run(s) for s in range(num_stages)]
    return lax.switch(lax.axis_index(PIPE), branches)


def _exchange(x: jax.Array) -> jax.Array:
    """Send row k to stage k; return the rows that the stages sent to this one."""
    return lax.all_to_all(x, PIPE, split_axis=0, concat_axis=0, tiled=True)
