"""`LeafPiece`: one array that a stage uses, made of the model's leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping, MutableSequence, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafPiece:
    """One array that a stage uses.

    It is a whole leaf, some layers of a stacked leaf, or a stack of leaves of several blocks.

    Attributes:
      leaves: the numbers of the leaves in the model: one, or several of the same shape to stack.
      dim: the dim of the layers, of which the piece has some; None if it has all.
      layers: the first of these layers, and the one after the last.
      is_stack: whether the piece is the leaves stacked along a new dim 0.
    """

    leaves: tuple[int, ...]
    dim: int | None = None
    layers: tuple[int, int] = (0, 0)
    is_stack: bool = False

    def cut(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the piece of the arrays of all leaves: whole leaves, or shards of them."""
        if self.is_stack:
            return jnp.stack([arrays[i] for i in self.leaves])
        x = arrays[self.leaves[0]]
        return x if self.dim is None else lax.slice_in_dim(x, *self.layers, axis=self.dim)

    def shape(self, leaf: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the piece, of leaves of the shape `leaf` or of their shards."""
        if self.is_stack:
            return (len(self.leaves), *leaf)
        count = self.layers[1] - self.layers[0]
        return tuple(count if d == self.dim else n for d, n in enumerate(leaf))

    def dim_of(self, dim: int) -> int:
        """Return the dim of the piece that is the dim `dim` of a leaf."""
        return dim + self.is_stack

    def placement(self, leaf: Placement, **changes: Any) -> Placement:
        """Return the placement of the piece, if leaves are placed as `leaf` but for changes."""
        dims = (None if d is None else self.dim_of(d) for d in (leaf.dim, leaf.stage_dim))
        dim, stage_dim = dims
        layer_dims = tuple(map(self.dim_of, leaf.layer_dims))
        return dataclasses.replace(
            leaf,
            shape=self.shape(leaf.shape),
            dim=dim,
            layer_dims=(0, *layer_dims) if self.is_stack else layer_dims,
            **{"stage_dim": stage_dim, **changes},
        )

    def add_to(self, wholes: MutableSequence[Any] | MutableMapping[int, Any], x: jax.Array) -> None:
        """Add the piece `x` in its place to arrays of the leaves, by number."""
        if self.is_stack:
            for row, i in enumerate(self.leaves):
                wholes[i] = wholes[i] + x[row]
            return
        (i,) = self.leaves
        if self.dim is None:
            wholes[i] = wholes[i] + x
        else:
            at = (slice(None),) * self.dim + (slice(*self.layers),)
            wholes[i] = wholes[i].at[at].add(x)
