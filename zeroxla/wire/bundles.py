"""Bundles: arrays that travel in one buffer, so that small ones share a collective."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

# A shard of at least this many elements travels by itself: joining it to others would copy it, and
# its leaf once more, for the latency of one collective.
ALONE_ELEMENTS = 2**14


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One array as a collective sees it: rows along `dim`, which it joins or splits.

    Attributes:
      shape: of one row; along `dim` a row may be several long.
      dim: the dim of the rows.
    """

    shape: tuple[int, ...]
    dim: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def num_rows(self, x: jax.Array) -> int:
        """Return how many rows x has."""
        return x.shape[self.dim] // self.shape[self.dim]

    def as_rows(self, x: jax.Array) -> jax.Array:
        """Return the rows of x as [rows, elements]."""
        return jnp.moveaxis(x, self.dim, 0).reshape(-1, self.size)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Return what `as_rows` was given, or as much of it as there are rows."""
        rest = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        x = rows.reshape(rows.shape[0] * self.shape[self.dim], *rest)
        return jnp.moveaxis(x, 0, self.dim)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The parcels of a buffer.

    Attributes:
      members: which of a unit's arrays they are.
      parcels: one for each.
      fused: they lie end to end in a buffer [rows, elements]; else it is one array as it is.
    """

    members: tuple[int, ...]
    parcels: tuple[Parcel, ...]
    fused: bool

    @property
    def dim(self) -> int:
        """The dim of the rows in the buffer."""
        return 0 if self.fused else self.parcels[0].dim

    def pack(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the buffer; `arrays` are those of the whole unit."""
        mine = [arrays[i] for i in self.members]
        if not self.fused:
            return mine[0]
        rows = [parcel.as_rows(x) for parcel, x in zip(self.parcels, mine, strict=True)]
        return jnp.concatenate(rows, axis=1)

    def unpack(self, buffer: jax.Array) -> list[jax.Array]:
        """Return the arrays in a buffer that has as many rows as the collective left."""
        if not self.fused:
            return [buffer]
        ends = itertools.accumulate(parcel.size for parcel in self.parcels)
        return [
            parcel.from_rows(lax.slice_in_dim(buffer, end - parcel.size, end, axis=1))
            for parcel, end in zip(self.parcels, ends, strict=True)
        ]


def bundle(parcels: Sequence[Parcel], kinds: Sequence[Hashable]) -> list[Bundle]:
    """Decide what travels together: small parcels of the same kind.

    Args:
      parcels: of a unit.
      kinds: of each: what its collectives do and in which dtype.
    """
    alone = [
        Bundle(members=(i,), parcels=(parcel,), fused=False)
        for i, parcel in enumerate(parcels)
        if parcel.size >= ALONE_ELEMENTS
    ]
    small: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        if parcels[i].size < ALONE_ELEMENTS:
            small.setdefault(kind, []).append(i)
    return alone + [
        Bundle(members=tuple(mine), parcels=tuple(parcels[i] for i in mine), fused=True)
        for mine in small.values()
    ]
