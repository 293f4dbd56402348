"""Bundles: small arrays that travel in one buffer, so that they share a collective."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

ALONE_ELEMENTS = 2**14
"""A shard of at least this many elements travels by itself. To join it to others would copy the
shard, and later its leaf, to save the latency of one collective."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """The shape of one array as a collective sees it: rows along a dim, which it joins or splits.

    Attributes:
      shape: the shape of one row, whose length along `dim` may be larger than 1.
      dim: the dim along which rows follow each other.
    """

    shape: tuple[int, ...]
    dim: int

    @property
    def size(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shape)

    def num_rows(self, x: jax.Array) -> int:
        """Return the number of rows of x."""
        return x.shape[self.dim] // self.shape[self.dim]

    def as_rows(self, x: jax.Array) -> jax.Array:
        """Return the rows of x as an array [rows, elements]."""
        return jnp.moveaxis(x, self.dim, 0).reshape(-1, self.size)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Undo `as_rows`, for any number of rows."""
        rest = self.shape[: self.dim] + self.shape[self.dim + 1 :]
        x = rows.reshape(rows.shape[0] * self.shape[self.dim], *rest)
        return jnp.moveaxis(x, 0, self.dim)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """The arrays that share one buffer.

    Attributes:
      members: the positions of these arrays in the unit.
      parcels: their shapes, one for each member.
      fused: whether the arrays lie end to end in a buffer [rows, elements]. If not, there is one
        array, and it is the buffer.
    """

    members: tuple[int, ...]
    parcels: tuple[Parcel, ...]
    fused: bool

    @property
    def dim(self) -> int:
        """The buffer's dim along which rows follow each other."""
        return 0 if self.fused else self.parcels[0].dim

    def pack(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Return the buffer, made from the arrays of the whole unit."""
        mine = [arrays[i] for i in self.members]
        if not self.fused:
            return mine[0]
        rows = [parcel.as_rows(x) for parcel, x in zip(self.parcels, mine, strict=True)]
        return jnp.concatenate(rows, axis=1)

    def unpack(self, buffer: jax.Array) -> list[jax.Array]:
        """Return the members of a buffer after a collective, which may have changed its rows."""
        if not self.fused:
            return [buffer]
        ends = itertools.accumulate(parcel.size for parcel in self.parcels)
        return [
            parcel.from_rows(lax.slice_in_dim(buffer, end - parcel.size, end, axis=1))
            for parcel, end in zip(self.parcels, ends, strict=True)
        ]


def bundle(
    parcels: Sequence[Parcel], kinds: Sequence[Hashable], alone_elements: int = ALONE_ELEMENTS
) -> list[Bundle]:
    """Decide which arrays of a unit travel together: small ones of the same kind.

    Args:
      parcels: the shapes of the unit's arrays.
      kinds: what the collectives of each array do, and in which dtype.
      alone_elements: an array whose rows have at least this many elements travels by itself.
    """
    alone = [
        Bundle(members=(i,), parcels=(parcel,), fused=False)
        for i, parcel in enumerate(parcels)
        if parcel.size >= alone_elements
    ]
    small: dict[Hashable, list[int]] = {}
    for i, kind in enumerate(kinds):
        if parcels[i].size < alone_elements:
            small.setdefault(kind, []).append(i)
    return alone + [
        Bundle(members=tuple(mine), parcels=tuple(parcels[i] for i in mine), fused=True)
        for mine in small.values()
    ]
