"""The mesh axis over which chosen atoms are split, and arrays cut into parts along it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.split.atoms import (
    Atom,
    Dim,
    Dims,
    atoms_in,
    expand,
    is_split,
    pieces_of,
    size_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitAxis:
    """Splits every chosen atom into equal parts, one for each device along a mesh axis.

    If the number of parts does not divide an atom's size, the last parts are padded with zeros.

    Attributes:
      parts: the number of parts. 1 means that every device has everything.
      name: the axis' name under `shard_map` or `vmap`; None if there is one part.
      part: the number of the part that is computed; None stands for the device's place along the
        axis.
      small: None for the program's own sizes. A number of parts asks for a small instance of the
        program: each chosen atom has the smallest size that shows how it divides over so many
        parts, and loops have one turn.
      sizes: the sizes that classes have in a small instance, whether they are split or not; None if
        only chosen ones are small.
      defers: whether `sum` leaves the sum to the caller.
    """

    parts: int
    name: str | None = None
    part: Any = None
    small: int | None = None
    sizes: Mapping[Atom, int] | None = None
    defers: bool = False

    @property
    def index(self) -> jax.Array | int:
        """The number of the part: this device's place along the axis, if nothing else is said."""
        if self.part is not None:
            return self.part
        return 0 if self.name is None else lax.axis_index(self.name)

    def sum(self, part: jax.Array) -> jax.Array:
        """Return the sum over the axis; with `defers`, this device's summand."""
        return part if self.name is None or self.defers else lax.psum(part, self.name)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Return every device's x, along a new first dim; each device gets the cotangent of its own
        x back, as all compute the same with the result."""
        return x[None] if self.name is None else _gathered(x, self.name)

    def shared(self, x: jax.Array) -> jax.Array:
        """Return every device's x, along a new first dim; each device gets the sum of all devices'
        cotangents of its own x back, as each computes something else with the result."""
        if self.name is None:
            return x[None]
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return _shared(x, self.name) if is_float else lax.all_gather(x, self.name)

    def dim_size(self, dim: Dim) -> int:
        """Return the size of a dim in one part."""
        return math.prod(map(self.atom_size, expand(dim)))

    def atom_size(self, atom: Atom) -> int:
        """Return the size of an atom in one part. In a small instance a loop's atom has size 1."""
        if pieces := pieces_of(atom):
            return sum(map(self.dim_size, pieces))
        if atom.chosen:
            return part_size(self._whole_size(atom), self.parts)
        if self.sizes is not None and atom in self.sizes:
            return self.sizes[atom]
        return self.turns(atom.size) if atom.is_loop else atom.size

    def is_cut(self, dim: Dim) -> bool:
        """Return whether a class of a dim is shorter in a part than in the program."""
        return any(self.atom_size(atom) != atom.size for atom in atoms_in(dim))

    def turns(self, length: int) -> int:
        """Return how many turns a loop of a length takes: all, or 1 in a small instance."""
        return length if self.small is None else 1

    def _whole_size(self, atom: Atom) -> int:
        """Return the size of a chosen atom in all parts together."""
        size = atom.size
        if self.sizes is not None and atom in self.sizes:
            return self.sizes[atom]
        if self.small is None:
            return size
        return self.small if size % self.small == 0 else 2 * self.small - 1

    def place(self, dim: Dim, at: int) -> int:
        """Return the place in a part where the piece begins that begins at `at` in a whole dim."""
        atoms = expand(dim)
        first = next((k for k, atom in enumerate(atoms) if self.is_cut((atom,))), None)
        if first is None:
            return at
        inner = atoms[first + 1 :]
        turns, rest = divmod(at, size_of(atoms[first:]))
        found = turns * self.dim_size(atoms[first:])
        for piece in pieces_of(atoms[first]) if rest else ():
            size = size_of(piece) * size_of(inner)
            if rest < size:
                return found + self.place((*piece, *inner), rest)
            found, rest = found + self.dim_size((*piece, *inner)), rest - size
        assert rest == 0, (dim, at)
        return found

    def take(self, whole: jax.Array, dims: Dims, *, of: SplitAxis | None = None) -> jax.Array:
        """Return this device's part of an array that the device has whole.

        Args:
          whole: the array.
          dims: its dims.
          of: says the sizes of atoms in the array; None stands for the program's own.
        """
        of = SplitAxis(parts=1) if of is None else of
        for d, dim in enumerate(dims):
            whole = self._take(whole, d, dim, of)
        return whole

    def take_along(self, whole: jax.Array, d: int, dim: Dim) -> jax.Array:
        """Return this device's part of an array along one dim, which is split."""
        return self._take(whole, d, dim, dataclasses.replace(self, parts=1))

    def _take(self, array: jax.Array, d: int, dim: Dim, of: SplitAxis) -> jax.Array:
        """Return the part of an array along one dim."""
        atoms = expand(dim)
        for k, atom in enumerate(atoms):
            # The atoms before this one have been cut to their parts already.
            outer, inner = self.dim_size(atoms[:k]), of.dim_size(atoms[k + 1 :])
            size, mine = of.atom_size(atom), self.atom_size(atom)
            if pieces := pieces_of(atom):
                if any(self.dim_size(piece) != of.dim_size(piece) for piece in pieces):
                    each = _sections(array, d, outer, inner, list(map(of.dim_size, pieces)))
                    pairs = zip(each, pieces, strict=True)
                    array = _joined((self._take(x, d + 1, piece, of) for x, piece in pairs), d)
            elif mine != size:
                parts, index = (self.parts, self.index) if atom.chosen else (1, 0)
                array = take_part(array, d, (outer, size, inner), mine, parts, index)
        return array

    def parts_along(self, whole: jax.Array, d: int, dim: Dim) -> jax.Array:
        """Return all parts of an array along one dim, which is split: [parts, *shape of a part]."""
        one = (dataclasses.replace(self, part=i) for i in range(self.parts))
        return jnp.stack([axis.take_along(whole, d, dim) for axis in one])

    def collect(self, part: jax.Array, dims: Dims) -> jax.Array:
        """Gather an array's parts; return it whole, without padding."""
        for d, dim in enumerate(dims):
            if self.name is not None and is_split(dim):
                part = self.joined_along(lax.all_gather(part, self.name), d, dim)
        return part

    def joined_along(self, parts: jax.Array, d: int, dim: Dim) -> jax.Array:
        """Undo `parts_along`. What every part has whole is taken from the first."""
        atoms = expand(dim)
        (k,) = (k for k, atom in enumerate(atoms) if is_split((atom,)))
        outer, inner, pieces = *map(self.dim_size, (atoms[:k], atoms[k + 1 :])), pieces_of(atoms[k])
        each = _sections(
            parts, d + 1, outer, inner, list(map(self.dim_size, pieces or (atoms[k : k + 1],)))
        )
        if pieces:
            whole = [
                self.joined_along(x, d + 1, piece) if is_split(piece) else x[0]
                for x, piece in zip(each, pieces, strict=True)
            ]
        else:
            found = jnp.moveaxis(each[0], 0, d + 1)  # [.., outer, parts, mine, inner, ..]
            found = found.reshape(*found.shape[: d + 1], -1, *found.shape[d + 3 :])
            whole = [lax.slice_in_dim(found, 0, self._whole_size(atoms[k]), axis=d + 1)]
        return _joined(whole, d)

    def counted_once(self, part: jax.Array, d: int, dim: Dim) -> jax.Array:
        """Return a part of an array that is summed along a split dim, over all parts.

        Pieces that every device has whole are zeros on all devices but the first.
        """
        split = self._split(dim)
        if split.all():
            return part
        here = lax.broadcast_in_dim(jnp.asarray(split) | (self.index == 0), part.shape, (d,))
        return jnp.where(here, part, 0)

    def _split(self, dim: Dim) -> np.ndarray:
        """Return which elements of a part of a dim belong to a split atom."""
        if not is_split(dim):
            return np.zeros(self.dim_size(dim), bool)
        atoms = expand(dim)
        (k,) = (k for k, atom in enumerate(atoms) if is_split((atom,)))
        outer, inner = map(self.dim_size, (atoms[:k], atoms[k + 1 :]))
        if pieces := pieces_of(atoms[k]):
            middle = np.concatenate([self._split(piece) for piece in pieces])
        else:
            middle = np.ones(self.atom_size(atoms[k]), bool)
        return np.tile(np.repeat(middle, inner), outer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x: jax.Array, name: str) -> jax.Array:
    return lax.all_gather(x, name)


def _gathered_forward(x: jax.Array, name: str) -> tuple[jax.Array, None]:
    return lax.all_gather(x, name), None


def _gathered_backward(name: str, _: None, ct: jax.Array) -> tuple[jax.Array]:
    return (lax.dynamic_index_in_dim(ct, lax.axis_index(name), keepdims=False),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared(x: jax.Array, name: str) -> jax.Array:
    return lax.all_gather(x, name)


def _shared_backward(name: str, _: None, ct: jax.Array) -> tuple[jax.Array]:
    return (lax.psum_scatter(ct, name),)


_shared.defvjp(_gathered_forward, _shared_backward)


def _sections(
    array: jax.Array, d: int, outer: int, inner: int, sizes: Sequence[int]
) -> list[jax.Array]:
    """Cut a dim of (outer, size, inner) along its middle factor into pieces of some sizes; the
    three factors are dims of the results."""
    apart = array.reshape(*array.shape[:d], outer, sum(sizes), inner, *array.shape[d + 1 :])
    return list(jnp.split(apart, np.cumsum(sizes)[:-1], axis=d + 1))


def _joined(sections: Iterable[jax.Array], d: int) -> jax.Array:
    """Undo `_sections`."""
    apart = jnp.concatenate(list(sections), axis=d + 1)
    return apart.reshape(*apart.shape[:d], -1, *apart.shape[d + 3 :])


def part_size(size: int, parts: int) -> int:
    """Return the size of each of so many equal parts, padding included."""
    return -(-size // parts)


def padded(array: jax.Array, dim: int, size: int) -> jax.Array:
    """Return an array with zeros appended to a dim until it has a size, if it is shorter."""
    missing = size - array.shape[dim]
    if missing <= 0:
        return array
    return jnp.pad(array, [(0, missing if d == dim else 0) for d in range(array.ndim)])


def take_part(
    whole: jax.Array,
    dim: int,
    factors: tuple[int, int, int],
    mine: int,
    parts: int,
    index: jax.Array | int,
) -> jax.Array:
    """Return one part of an array whose dim is split; zeros where the last parts are padding.

    Args:
      whole: the array.
      dim: the dim that is split.
      factors: (outer, size, inner), the dim's size as a product. The middle factor is split.
      mine: the size of one part of the middle factor.
      parts: the number of parts.
      index: which part to return.
    """
    outer, size, inner = factors
    rest = whole.shape[dim + 1 :]
    apart = whole.reshape(*whole.shape[:dim], outer, size, inner, *rest)
    apart = padded(apart, dim + 1, parts * mine)
    found = lax.dynamic_slice_in_dim(apart, index * mine, mine, axis=dim + 1)
    return found.reshape(*whole.shape[:dim], outer * mine * inner, *rest)
