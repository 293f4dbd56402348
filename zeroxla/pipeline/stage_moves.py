"""Leaves on their way between where they are stored and the stages that use them.

A stacked leaf of which every stage uses as many layers is stored by stage: its layers on the
devices that use them. It stays there.

Any other leaf is split over all devices between steps, those of all stages among them, as without
a pipeline. Once in a step what a stage needs is brought together on its devices: each device sends
each stage the parts that it stores of that stage's leaves, in one exchange over `pipe`, and then
holds the shards that it would store if the stage's devices were all there are. Gradients go the
same way back. So a stage with heavy layers holds no more between steps than another, a leaf that
several stages share is stored once, and any optimizer sees whole trees in natural shapes.

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What a stage uses of a leaf: all of it, or some of its layers.

    Attributes:
      leaf: its number in the model.
      dim: the layer dim that is cut; None if the whole leaf is used.
      layers: first and one past the last.
    """

    leaf: int
    dim: int | None = None
    layers: tuple[int, int] = (0, 0)

    def cut(self, x: jax.Array) -> jax.Array:
        """Return the piece of a leaf, or of a part of it."""
        return x if self.dim is None else lax.slice_in_dim(x, *self.layers, axis=self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the piece of an array."""
        count = self.layers[1] - self.layers[0]
        return tuple(count if d == self.dim else n for d, n in enumerate(whole))

    def add_to(self, whole: jax.Array, x: jax.Array) -> jax.Array:
        """Return `whole` with a piece added in its place."""
        if self.dim is None:
            return whole + x
        at = (slice(None),) * self.dim + (slice(*self.layers),)
        return whole.at[at].add(x)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """The exchange over `pipe`.

    Attributes:
      num_stages: length of the axis.
      placements: of the model's leaves, over all devices.
      world: devices of all stages.
      pieces: what each stage uses.
      packing: of the parts that one device stores.
    """

    num_stages: int
    world: int
    placements: tuple[Placement, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    packing: Packing

    @staticmethod
    def make(
        placements: Sequence[Placement],
        pieces: Sequence[Sequence[Piece]],
        *,
        world: int,
        dtype: jnp.dtype,
    ) -> Moves:
        """Plan the exchange.

        Args:
          placements, pieces: as the attributes.
          world: the number of devices, of all stages.
          dtype: in which leaves travel.

        Raises:
          ValueError: a leaf is stored by stage, for other stages.
        """
        _check_own(placements, pieces)
        shapes = [
            [
                jax.ShapeDtypeStruct(piece.shape(placements[piece.leaf].part_shape(world)), dtype)
                for piece in mine
                if _travels(placements[piece.leaf])
            ]
            for mine in pieces
        ]
        return Moves(
            num_stages=len(pieces),
            world=world,
            placements=tuple(placements),
            pieces=tuple(map(tuple, pieces)),
            packing=make_packing(shapes),
        )

    def to_stages(self, stored: Sequence[jax.Array]) -> Buffers:
        """Send every stage its pieces.

        Args:
          stored: what this device stores of the model's leaves.

        Returns:
          For each buffer of the packing [stages, elements]: the parts that this device's stage
          needs, by the stage that stored them; `leaves` reads them.

        Cost: each device receives (1 - 1/stages) x its shards of its stage's leaves; one collective
        for each buffer.
        """
        with jax.named_scope("move"):
            sent = [
                self.packing.pack(stage, [p.cut(stored[p.leaf]) for p in self._split(stage)])
                for stage in range(self.num_stages)
            ]
            return [_exchange(jnp.stack(parts)) for parts in zip(*sent, strict=True)]

    def leaves(self, stage: int, buffers: Buffers, stored: Sequence[jax.Array]) -> list[jax.Array]:
        """Return a stage's pieces: shards from what its device received, and from what it stores
        those that do not travel."""
        parts = [
            self.packing.unpack(stage, [b[k] for b in buffers]) for k in range(self.num_stages)
        ]
        shards = zip(*parts)
        found = []
        for piece in self.pieces[stage]:
            placement = self.placements[piece.leaf]
            if _travels(placement):
                found.append(jnp.concatenate(next(shards), placement.dim))
            else:
                x = stored[piece.leaf]
                found.append(piece.cut(x) if placement.dim is None else x)
        return found

    def packed(self, stage: int, shards: Sequence[jax.Array]) -> Buffers:
        """Return what `from_stages` takes, from shards of the pieces that travel."""
        cut = [
            jnp.split(x, self.num_stages, self.placements[p.leaf].split_dim)
            for x, p in zip(shards, self._split(stage), strict=True)
        ]
        rows = [self.packing.pack(stage, parts) for parts in zip(*cut)]
        if not rows:
            rows = [self.packing.zeros()] * self.num_stages
        return [jnp.stack(parts) for parts in zip(*rows, strict=True)]

    def from_stages(self, buffers: Buffers) -> list[jax.Array | None]:
        """Send every part back to who stores it, and add up what several stages have of a leaf.

        Args:
          buffers: as `packed` makes them.

        Returns:
          For each leaf the sum, in the shape that this device stores; None for a leaf that does
          not travel.
        """
        with jax.named_scope("move"):
            found = [_exchange(x) for x in buffers]
            leaves: list[jax.Array | None] = [None] * len(self.placements)
            for stage in range(self.num_stages):
                arrived = self.packing.unpack(stage, [b[stage] for b in found])
                for piece, x in zip(self._split(stage), arrived, strict=True):
                    whole = leaves[piece.leaf]
                    if whole is None:
                        shape = self.placements[piece.leaf].part_shape(self.world)
                        whole = jnp.zeros(shape, x.dtype)
                    leaves[piece.leaf] = piece.add_to(whole, x)
            return leaves

    def _split(self, stage: int) -> list[Piece]:
        return [p for p in self.pieces[stage] if _travels(self.placements[p.leaf])]


def own_layers(stages: Sequence[Any], leaves: Sequence[Any]) -> dict[int, int]:
    """Return the leaves that can be stored by stage, with their layer dims: those of which each
    stage uses as many layers, in order.

    Args:
      stages: with `pieces`.
      leaves: of the model, or their shapes.
    """
    found: dict[int, list[Piece]] = {}
    for stage in stages:
        for piece in stage.pieces:
            found.setdefault(piece.leaf, []).append(piece)
    return {
        leaf: mine[0].dim
        for leaf, mine in found.items()
        if mine[0].dim is not None and _is_even(mine, len(stages), leaves[leaf].shape)
    }


def _is_even(pieces: Sequence[Piece], num_stages: int, shape: Sequence[int]) -> bool:
    dim = pieces[0].dim
    assert dim is not None
    each, rest = divmod(shape[dim], num_stages)
    layers = [(stage * each, (stage + 1) * each) for stage in range(num_stages)]
    return not rest and all(p.dim == dim for p in pieces) and [p.layers for p in pieces] == layers


def _check_own(placements: Sequence[Placement], pieces: Sequence[Sequence[Piece]]) -> None:
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


def _travels(placement: Placement) -> bool:
    return placement.dim is not None and placement.stage_dim is None


def each_stage(num_stages: int, run: Callable[[int], Any]) -> Any:
    """Return what `run(stage)` returns for this device's stage."""
    branches = [lambda s=s: run(s) for s in range(num_stages)]
    return lax.switch(lax.axis_index(PIPE), branches)


def _exchange(x: jax.Array) -> jax.Array:
    """Give row k to stage k; return what each gave this one."""
    return lax.all_to_all(x, PIPE, split_axis=0, concat_axis=0, tiled=True)
