"""The mesh axis over which chosen atoms are split, and arrays cut into parts along it."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.split.atoms import Atom, Dim, Dims, chosen_factors, expand, size_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitAxis:
    """Splits every chosen atom into equal parts, one for each device along a mesh axis.

    If the number of parts does not divide an atom's size, the last parts are padded with zeros.

    Attributes:
      parts: the number of parts. 1 means that every device has everything.
      name: the axis' name under `shard_map` or `vmap`; None if there is one part.
      small: None for the program's own sizes. A number of parts asks for a small instance of the
        program: each chosen atom has the smallest size that shows how it divides over so many
        parts, and loops have one turn.
    """

    parts: int
    name: str | None = None
    small: int | None = None

    @property
    def index(self) -> jax.Array | int:
        """This device's place along the axis."""
        return 0 if self.name is None else lax.axis_index(self.name)

    def sum(self, part: jax.Array) -> jax.Array:
        """Return the sum over the axis."""
        return part if self.name is None else lax.psum(part, self.name)

    def dim_size(self, dim: Dim) -> int:
        """Return the size of a dim in one part."""
        return math.prod(map(self.atom_size, expand(dim)))

    def atom_size(self, atom: Atom) -> int:
        """Return the size of an atom in one part. In a small instance a loop's atom has size 1."""
        if atom.chosen:
            return part_size(self._whole_size(atom.size), self.parts)
        return self.turns(atom.size) if atom.is_loop else atom.size

    def turns(self, length: int) -> int:
        """Return how many turns a loop of a length takes: all, or 1 in a small instance."""
        return length if self.small is None else 1

    def _whole_size(self, size: int) -> int:
        """Return the size of a chosen atom in all parts together."""
        if self.small is None:
            return size
        return self.small if size % self.small == 0 else 2 * self.small - 1

    def take(self, whole: jax.Array, dims: Dims) -> jax.Array:
        """Return this device's part of an array that the device has whole."""
        for d, dim in enumerate(dims):
            atoms = expand(dim)
            for k, atom in enumerate(atoms):
                if self.atom_size(atom) != atom.size:
                    # The atoms before this one have been cut to their parts already.
                    outer, inner = self.dim_size(atoms[:k]), size_of(atoms[k + 1 :])
                    factors, mine = (outer, atom.size, inner), self.atom_size(atom)
                    parts, index = (self.parts, self.index) if atom.chosen else (1, 0)
                    whole = take_part(whole, d, factors, mine, parts, index)
        return whole

    def collect(self, part: jax.Array, dims: Dims) -> jax.Array:
        """Gather an array's parts; return it whole, without padding."""
        for d, dim in enumerate(dims):
            if self.name is not None and (factors := chosen_factors(dim)) is not None:
                outer, size, inner = factors
                whole = self._whole_size(size)
                shape = (*part.shape[:d], outer, -1, inner, *part.shape[d + 1 :])
                part = lax.all_gather(part.reshape(shape), self.name, axis=d + 1, tiled=True)
                part = lax.slice_in_dim(part, 0, whole, axis=d + 1)
                part = part.reshape(*part.shape[:d], -1, *part.shape[d + 3 :])
        return part


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
