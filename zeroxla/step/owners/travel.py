"""`Travel`: brings the shards of matrices to their owners, and those of the results back.

Everything here runs inside `shard_map`. Each way is one all-to-all for each dtype. Its buffer,
[owners, elements], has a row for each owner: first the matrices of which every owner has the same
number, group by group, and then the rest, which begins at another place for each owner.

Shapes: W owners; N matrices of a group; E elements of a shard of one matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.mesh.placement import Placement
from zeroxla.step.owners.groups import OwnersShare
from zeroxla.wire.hops import as_bits, from_bits

Slot = tuple[int, int]
"""(number of a group, position of a value among those that its pieces read or make)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnedParcel:
    """One value of a group as it travels.

    Attributes:
      shape: the shape of the value for one matrix, whole.
      dtype: its dtype.
      placement: the dim along which it is split, and the axes in the order of its shards.
    """

    shape: tuple[int, ...]
    dtype: Any
    placement: Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Travel:
    """One all-to-all for each dtype, of the values that some groups read or make.

    Attributes:
      axes: the axes over which the owners lie, the outermost first.
      lengths: the lengths of the axes.
      shares: who owns what, by group.
      parcels: the values that travel.
      even, rest: where a value begins in its buffer: the even part, and by owner each matrix of the
        rest.
      ends: by dtype, the end of the buffer's even part, and of the buffer.
    """

    axes: tuple[str, ...]
    lengths: tuple[int, ...]
    shares: Sequence[OwnersShare]
    parcels: Mapping[Slot, OwnedParcel]
    even: Mapping[Slot, int]
    rest: Mapping[Slot, np.ndarray]
    ends: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(
        axes: tuple[str, ...],
        lengths: tuple[int, ...],
        shares: Sequence[OwnersShare],
        parcels: Mapping[Slot, OwnedParcel],
    ) -> Travel:
        """Lay out the buffers."""
        owners, even = math.prod(lengths), {}
        most = max((len(mine) for share in shares for mine in share.rest), default=0)
        rest = {slot: np.zeros((owners, max(1, most)), np.int32) for slot in parcels}
        ends: dict[str, tuple[int, int]] = {}
        for dtype in dict.fromkeys(str(p.dtype) for p in parcels.values()):
            mine = {slot: p for slot, p in parcels.items() if str(p.dtype) == dtype}
            end = 0
            for slot, parcel in mine.items():
                even[slot] = end
                end += shares[slot[0]].each * _elements(parcel, owners)
            last = [end] * owners
            for owner in range(owners):
                for slot, parcel in mine.items():
                    for i in range(len(shares[slot[0]].rest[owner])):
                        rest[slot][owner, i] = last[owner]
                        last[owner] += _elements(parcel, owners)
            ends[dtype] = end, max(last)
        return Travel(
            axes=axes,
            lengths=lengths,
            shares=shares,
            parcels=parcels,
            even=even,
            rest=rest,
            ends=ends,
        )

    @property
    def num_owners(self) -> int:
        """The number of owners."""
        return math.prod(self.lengths)

    @property
    def received_bytes(self) -> int:
        """The bytes that one device receives from others."""
        sizes = {dtype: jnp.dtype(dtype).itemsize for dtype in self.ends}
        return sum((self.num_owners - 1) * end * sizes[d] for d, (_, end) in self.ends.items())

    def to_owners(self, shards: Mapping[Slot, jax.Array]) -> dict[str, jax.Array]:
        """Send shards, [N, *shape of a shard]; return what came, [W, elements], by dtype."""
        found = {}
        for dtype, mine in self._by_dtype().items():
            owners = range(self.num_owners)
            rows = {slot: as_bits(shards[slot]).reshape(len(shards[slot]), -1) for slot in mine}
            even = [self._even_part(slot, rows[slot]) for slot in mine]
            rest = [self._rest_part(dtype, owner, rows) for owner in owners]
            found[dtype] = self._exchanged(jnp.concatenate([*even, jnp.stack(rest)], axis=1))
        return found

    def even_matrices(self, slot: Slot, came: Mapping[str, jax.Array]) -> jax.Array:
        """Return the even part of a value that came, whole: [each, *shape]."""
        parcel, each = self.parcels[slot], self.shares[slot[0]].each
        size, start = _elements(parcel, self.num_owners), self.even[slot]
        found = came[str(parcel.dtype)][:, start : start + each * size]
        shards = found.reshape(self.num_owners, each, *_shard_shape(parcel, self.num_owners))
        return jax.vmap(lambda x: self._joined(parcel, x), in_axes=1)(shards)

    def rest_matrix(self, slot: Slot, came: Mapping[str, jax.Array], i: jax.Array) -> jax.Array:
        """Return this owner's matrix number i of the rest, whole."""
        parcel, start = self.parcels[slot], self._rest_start(slot, i)
        size = _elements(parcel, self.num_owners)
        found = lax.dynamic_slice_in_dim(came[str(parcel.dtype)], start, size, axis=1)
        shape = self.num_owners, *_shard_shape(parcel, self.num_owners)
        return self._joined(parcel, found.reshape(shape))

    def empty_rest(self) -> dict[str, jax.Array]:
        """Return buffers for results of the rest, [W, elements], by dtype."""
        sizes = {dtype: end - start for dtype, (start, end) in self.ends.items()}
        return {
            dtype: jnp.zeros((self.num_owners, size), _bits(dtype)) for dtype, size in sizes.items()
        }

    def with_rest(
        self, slot: Slot, buffers: dict[str, jax.Array], i: jax.Array, whole: jax.Array
    ) -> dict[str, jax.Array]:
        """Return buffers of the rest with this owner's result number i."""
        parcel = self.parcels[slot]
        dtype = str(parcel.dtype)
        start = self._rest_start(slot, i) - self.ends[dtype][0]
        shards = as_bits(self._cut(parcel, whole)).reshape(self.num_owners, -1)
        new = lax.dynamic_update_slice_in_dim(buffers[dtype], shards, start, axis=1)
        return {**buffers, dtype: new}

    def from_owners(
        self, even: Mapping[Slot, jax.Array], rest: Mapping[str, jax.Array]
    ) -> dict[Slot, jax.Array]:
        """Send results back; return this device's shards of all matrices, [N, *shape of a shard].

        Args:
          even: the even part of each value, whole: [each, *shape].
          rest: the buffers of `with_rest`.
        """
        found: dict[Slot, jax.Array] = {}
        for dtype, mine in self._by_dtype().items():
            parts = []
            for slot in mine:
                cut = jax.vmap(lambda x, slot=slot: self._cut(self.parcels[slot], x), out_axes=1)
                parts.append(as_bits(cut(even[slot])).reshape(self.num_owners, -1))
            came = self._exchanged(jnp.concatenate([*parts, rest[dtype]], axis=1))
            found.update((slot, self._matrices(slot, came)) for slot in mine)
        return found

    def _by_dtype(self) -> dict[str, list[Slot]]:
        found: dict[str, list[Slot]] = defaultdict(list)
        for slot, parcel in self.parcels.items():
            found[str(parcel.dtype)].append(slot)
        return found

    def _exchanged(self, buffer: jax.Array) -> jax.Array:
        return lax.all_to_all(buffer, self.axes, split_axis=0, concat_axis=0, tiled=True)

    def _even_part(self, slot: Slot, rows: jax.Array) -> jax.Array:
        num = self.shares[slot[0]].each * self.num_owners
        return rows[:num].reshape(self.num_owners, -1)

    def _rest_part(self, dtype: str, owner: int, rows: Mapping[Slot, jax.Array]) -> jax.Array:
        parts = [
            rows[slot][matrix]
            for slot in self._by_dtype()[dtype]
            for matrix in self.shares[slot[0]].rest[owner]
        ]
        start, end = self.ends[dtype]
        missing = end - start - sum(part.size for part in parts)
        return jnp.concatenate([*parts, jnp.zeros(missing, _bits(dtype))])

    def _rest_start(self, slot: Slot, i: jax.Array) -> jax.Array:
        return jnp.asarray(self.rest[slot])[lax.axis_index(self.axes), i]

    def _matrices(self, slot: Slot, came: jax.Array) -> jax.Array:
        """Return the shards of a group's matrices, in order, from a buffer that came back."""
        parcel, share = self.parcels[slot], self.shares[slot[0]]
        size, start = _elements(parcel, self.num_owners), self.even[slot]
        shape = _shard_shape(parcel, self.num_owners)
        even = came[:, start : start + share.each * size].reshape(-1, *shape)
        rest = {
            matrix: came[owner, begin : begin + size].reshape(1, *shape)
            for owner, mine in enumerate(share.rest)
            for matrix, begin in zip(mine, self.rest[slot][owner].tolist(), strict=False)
        }
        found = jnp.concatenate([even, *(x for _, x in sorted(rest.items()))])
        return from_bits(found, jnp.dtype(parcel.dtype))

    def _joined(self, parcel: OwnedParcel, shards: jax.Array) -> jax.Array:
        """Return a matrix whole, from its shards in the order of the owners."""
        dim, order = parcel.placement.split_dim, self._order(parcel)
        shards = from_bits(shards, jnp.dtype(parcel.dtype))
        shards = shards if order is None else shards[np.argsort(order)]
        shape = list(shards.shape[1:])
        shape[dim] *= self.num_owners
        found = jnp.moveaxis(shards, 0, dim).reshape(shape)
        return lax.slice_in_dim(found, 0, parcel.shape[dim], axis=dim)

    def _cut(self, parcel: OwnedParcel, whole: jax.Array) -> jax.Array:
        """Undo `_joined`."""
        dim, order = parcel.placement.split_dim, self._order(parcel)
        shape = _shard_shape(parcel, self.num_owners)
        missing = shape[dim] * self.num_owners - whole.shape[dim]
        if missing:
            whole = jnp.pad(whole, [(0, missing if d == dim else 0) for d in range(whole.ndim)])
        apart = whole.reshape(*shape[:dim], self.num_owners, *shape[dim:])
        shards = jnp.moveaxis(apart, dim, 0)
        return shards if order is None else shards[order]

    def _order(self, parcel: OwnedParcel) -> np.ndarray | None:
        """Return, for each owner in order, the number of the shard that it has; None if they have
        them in order."""
        mine = parcel.placement.axes
        if mine == self.axes:
            return None
        lengths = dict(zip(self.axes, self.lengths, strict=True))
        shards = np.arange(self.num_owners).reshape([lengths[axis] for axis in mine])
        return shards.transpose([mine.index(axis) for axis in self.axes]).ravel()


def _bits(dtype: str) -> Any:
    """Return the dtype in which an array of a dtype travels."""
    return jnp.dtype("uint16") if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def _shard_shape(parcel: OwnedParcel, owners: int) -> tuple[int, ...]:
    dim = parcel.placement.split_dim
    return tuple(-(-n // owners) if d == dim else n for d, n in enumerate(parcel.shape))


def _elements(parcel: OwnedParcel, owners: int) -> int:
    return math.prod(_shard_shape(parcel, owners))
