"""`OwnersTurn`: the matrix pieces of one turn, computed by their owners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.mesh.axes import PIPE
from zeroxla.mesh.placement import Placement
from zeroxla.program.trace import Value
from zeroxla.step.owners.groups import OwnedGroup, OwnersShare, shares_of
from zeroxla.step.owners.travel import OwnedParcel, Slot, Travel

SCOPE = "owners"

BATCH_ELEMENTS = 2**24
"""Matrices of one shape are computed together as long as they have at most so many elements."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OwnersTurn:
    """Groups whose owners lie over the same axes, and which do not wait for each other.

    Attributes:
      groups: the groups.
      shares: who owns what, by group.
      busiest: the FLOPs of the busiest owner.
      there, back: what travels to the owners, and back.
      mesh: the mesh.
    """

    groups: tuple[OwnedGroup, ...]
    shares: tuple[OwnersShare, ...]
    busiest: float
    there: Travel
    back: Travel
    mesh: Mesh

    @staticmethod
    def of(groups: Sequence[OwnedGroup], mesh: Mesh) -> OwnersTurn:
        """Give the matrices of groups their owners."""
        axes = groups[0].axes
        lengths = tuple(mesh.shape[axis] for axis in axes)
        shares, busiest = shares_of(groups, math.prod(lengths))
        travels = [
            Travel.of(axes, lengths, shares, _parcels(groups, result=result))
            for result in (False, True)
        ]
        return OwnersTurn(
            groups=tuple(groups),
            shares=tuple(shares),
            busiest=busiest,
            there=travels[0],
            back=travels[1],
            mesh=mesh,
        )

    def run(self, env: dict[Value, Any]) -> None:
        """Compute the groups' results, and add them to `env`, which has what they read.

        Cost: a device's part of what travels, four times.
        """
        split, spread = self._split_inputs(env), self._whole_inputs(env)
        in_specs = {slot: [p.spec for _, p in arrays] for slot, arrays in split.items()}
        stored = {slot: [p.stored(x) for x, p in arrays] for slot, arrays in split.items()}
        split_specs = {slot: self._result(slot).spec for slot in self.back.parcels}
        out_specs = {slot: [spec] * len(self._pieces(slot)) for slot, spec in split_specs.items()}
        with jax.named_scope(SCOPE):
            found, small = jax.shard_map(
                self._local,
                mesh=self.mesh,
                in_specs=(in_specs, PartitionSpec()),
                out_specs=(out_specs, PartitionSpec()),
                check_vma=False,
            )(stored, spread)
        for slot, arrays in found.items():
            for piece, x in zip(self._pieces(slot), arrays, strict=True):
                env[piece.results[slot[1]]] = self._result(slot).natural(x)
        for slot, array in small.items():
            for piece, x in zip(self._pieces(slot), array, strict=True):
                env[piece.results[slot[1]]] = self._with_layers(slot, x)

    def _pieces(self, slot: Slot) -> tuple[Any, ...]:
        return self.groups[slot[0]].pieces

    def _result(self, slot: Slot) -> Placement:
        placement = self.groups[slot[0]].results[slot[1]]
        assert placement is not None, slot
        return placement

    def _split_inputs(
        self, env: Mapping[Value, Any]
    ) -> dict[Slot, list[tuple[jax.Array, Placement]]]:
        """Return the arrays that travel, with their placements, by piece."""
        return {
            (g, k): [(env[piece.reads[k]], placement) for piece in self.groups[g].pieces]
            for g, k in self.there.parcels
            if (placement := self.groups[g].reads[k]) is not None
        }

    def _whole_inputs(self, env: Mapping[Value, Any]) -> dict[Slot, jax.Array]:
        """Return what every device has whole: one array if the pieces of a group share it,
        otherwise [pieces, *shape]."""
        found = {}
        for g, group in enumerate(self.groups):
            for k in range(len(group.reads)):
                if (g, k) not in self.there.parcels:
                    values = [piece.reads[k] for piece in group.pieces]
                    arrays = [env[v] for v in dict.fromkeys(values)]
                    found[g, k] = arrays[0] if len(arrays) == 1 else jnp.stack(arrays)
        return found

    def _local(
        self, split: Mapping[Slot, list[jax.Array]], whole: Mapping[Slot, jax.Array]
    ) -> tuple[dict[Slot, list[jax.Array]], dict[Slot, jax.Array]]:
        """Compute this device's matrices: the body of the `shard_map`."""
        rows = {slot: self._rows(slot, arrays) for slot, arrays in split.items()}
        came = self.there.to_owners(rows)
        even: dict[Slot, jax.Array] = {}
        small = self._no_small()
        rest = self.back.empty_rest()
        for g, group in enumerate(self.groups):
            if self.shares[g].each:
                small |= self._even(g, group, came, whole, even, small)
            else:
                even |= {slot: self._nothing(slot) for slot in self.back.parcels if slot[0] == g}
            if any(self.shares[g].rest):
                rest, small = self._rest(g, group, came, whole, rest, small)
        shards = self.back.from_owners(even, rest)
        found = {slot: self._unstacked(slot, x) for slot, x in shards.items()}
        axes = (*self.there.axes, *((PIPE,) if self._is_staged else ()))
        return found, {slot: _sum(x, axes) for slot, x in small.items()}

    @property
    def _is_staged(self) -> bool:
        return any(group.num_stages > 1 for group in self.groups)

    def _even(
        self,
        g: int,
        group: OwnedGroup,
        came: Mapping[str, jax.Array],
        whole: Mapping[Slot, jax.Array],
        even: dict[Slot, jax.Array],
        small: Mapping[Slot, jax.Array],
    ) -> dict[Slot, jax.Array]:
        """Compute the matrices of which every owner has the same number. Add those results that
        travel to `even`, and return the small ones."""
        each = self.shares[g].each
        numbers = lax.axis_index(self.there.axes) * each + jnp.arange(each)
        slots = [slot for slot in self.there.parcels if slot[0] == g]
        matrices = {slot: self.there.even_matrices(slot, came) for slot in slots}

        def compute(x: tuple[dict[Slot, jax.Array], jax.Array]) -> list[jax.Array]:
            return self._compute(g, group, x[0], whole, x[1])

        size = sum(x[0].size for x in matrices.values())
        together = max(1, BATCH_ELEMENTS // max(1, size))
        results = lax.map(compute, (matrices, numbers), batch_size=min(each, together))
        found = {}
        for k, x in enumerate(results):
            if (g, k) in self.back.parcels:
                even[g, k] = x
            else:
                found[g, k] = small[g, k].at[self._places(group, numbers)].set(x)
        return found

    def _rest(
        self,
        g: int,
        group: OwnedGroup,
        came: Mapping[str, jax.Array],
        whole: Mapping[Slot, jax.Array],
        rest: dict[str, jax.Array],
        small: dict[Slot, jax.Array],
    ) -> tuple[dict[str, jax.Array], dict[Slot, jax.Array]]:
        """Compute the other matrices of this owner, one after another. Return the buffers of the
        results that travel, and the small results."""
        owner, share = lax.axis_index(self.there.axes), self.shares[g]
        most = max(map(len, share.rest))
        numbers = np.array([[*mine, *[0] * (most - len(mine))] for mine in share.rest], np.int32)
        count = jnp.asarray([len(mine) for mine in share.rest], np.int32)[owner]
        slots = [slot for slot in self.there.parcels if slot[0] == g]

        def turn(i: jax.Array, found: tuple[Any, Any]) -> tuple[Any, Any]:
            rest, small = found
            number = jnp.asarray(numbers)[owner, i]
            matrices = {slot: self.there.rest_matrix(slot, came, i) for slot in slots}
            for k, x in enumerate(self._compute(g, group, matrices, whole, number)):
                if (g, k) in self.back.parcels:
                    rest = self.back.with_rest((g, k), rest, i, x)
                else:
                    places = self._places(group, number)
                    small = {**small, (g, k): small[g, k].at[places].set(x)}
            return rest, small

        with jax.named_scope(f"rest_{g}"):
            return lax.fori_loop(0, count, turn, (rest, small))

    def _compute(
        self,
        g: int,
        group: OwnedGroup,
        matrices: Mapping[Slot, jax.Array],
        whole: Mapping[Slot, jax.Array],
        number: jax.Array,
    ) -> list[jax.Array]:
        """Compute one matrix of a group."""
        piece, layer = self._places(group, number)
        args = []
        for k, v in enumerate(group.piece.reads):
            if (g, k) in matrices:
                args.append(matrices[g, k])
                continue
            x = whole[g, k]
            x = x[piece] if x.ndim > v.aval.ndim else x
            dim = None if group.layers is None else group.layers.reads[k]
            args.append(x if dim is None else lax.dynamic_slice_in_dim(x, layer, 1, axis=dim))
        return group.run(args, layer)

    def _places(self, group: OwnedGroup, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the piece and the layer, counted over all stages, of a matrix by its number."""
        here = group.layers_here
        stage = lax.axis_index(PIPE) if group.num_stages > 1 else 0
        return number // here, stage * here + number % here

    def _no_small(self) -> dict[Slot, jax.Array]:
        """Return zeros for the results that do not travel: [pieces, layers, *shape]."""
        found = {}
        for g, group in enumerate(self.groups):
            layers = group.layers_here * group.num_stages
            for k, v in enumerate(group.piece.results):
                if (g, k) not in self.back.parcels:
                    shape = group.shape_of(k, result=True)
                    found[g, k] = jnp.zeros((len(group.pieces), layers, *shape), v.aval.dtype)
        return found

    def _nothing(self, slot: Slot) -> jax.Array:
        parcel = self.back.parcels[slot]
        return jnp.zeros((0, *parcel.shape), parcel.dtype)

    def _rows(self, slot: Slot, shards: Sequence[jax.Array]) -> jax.Array:
        """Return this device's shards of a group's matrices, [N, *shape of a shard]."""
        layers = self.groups[slot[0]].layers
        if layers is None:
            return jnp.stack(shards)
        dim = layers.reads[slot[1]]
        assert dim is not None, slot
        apart = [jnp.expand_dims(jnp.moveaxis(x, dim, 0), dim + 1) for x in shards]
        return jnp.concatenate(apart)

    def _unstacked(self, slot: Slot, rows: jax.Array) -> list[jax.Array]:
        """Undo `_rows`, for a result."""
        group = self.groups[slot[0]]
        pieces = rows.reshape(len(group.pieces), group.layers_here, *rows.shape[1:])
        return [self._with_layers(slot, x) for x in pieces]

    def _with_layers(self, slot: Slot, matrices: jax.Array) -> jax.Array:
        """Return a result of one piece, from that of its matrices, [layers, *shape]."""
        layers = self.groups[slot[0]].layers
        if layers is None:
            return matrices[0]
        dim = layers.results[slot[1]]
        assert dim is not None, slot
        return jnp.moveaxis(jnp.squeeze(matrices, dim + 1), 0, dim)


def _parcels(groups: Sequence[OwnedGroup], *, result: bool) -> dict[Slot, OwnedParcel]:
    """Return the values that travel to the owners, or back."""
    found = {}
    for g, group in enumerate(groups):
        values = group.piece.results if result else group.piece.reads
        for k, p in enumerate(group.results if result else group.reads):
            # What all pieces of a group share stays on all devices.
            shared = not result and len(group.pieces) > 1
            shared = shared and len({piece.reads[k] for piece in group.pieces}) == 1
            if p is not None and not shared:
                shape = group.shape_of(k, result=result)
                found[g, k] = OwnedParcel(shape=shape, dtype=values[k].aval.dtype, placement=p)
    return found


def _sum(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Add up arrays that are zero where another device has something."""
    found = lax.psum(x.astype(jnp.int32) if x.dtype == bool else x, tuple(axes))
    return found.astype(x.dtype)
