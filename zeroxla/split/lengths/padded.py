"""Arrays with padding: along some dims they hold more elements than count.

What counts comes first. Padding holds values like those that count, such as the last one again, so
that nothing computed from it overflows; nothing that counts is computed from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """The length of a sequence, as a factor of dims.

    Attributes:
      size: the number of elements that count.
      held: the number of elements that arrays have, padding included.
      is_made: whether the array was made of nothing, such as positions, for a length that others
        have: its dim may be another one of the same size.
    """

    size: int
    held: int
    is_made: bool = False

    @property
    def is_padded(self) -> bool:
        """Whether there is padding."""
        return self.held != self.size


Factor = int | Length
Factors = tuple[Factor, ...]
"""A dim as a product, the outermost factor first; none for a dim of size 1."""


def size_of(factor: Factor) -> int:
    """Return the number of elements that count."""
    return factor.size if isinstance(factor, Length) else factor


def held_of(factor: Factor) -> int:
    """Return the number of elements, padding included."""
    return factor.held if isinstance(factor, Length) else factor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """An array with padding.

    Attributes:
      array: the array.
      dims: its dims.
      is_computed: whether it depends on a batch.
    """

    array: Any
    dims: tuple[Factors, ...]
    is_computed: bool = False

    @staticmethod
    def plain(array: Any, *, is_computed: bool = False) -> Padded:
        """Return an array without padding."""
        dims = tuple((n,) if n != 1 else () for n in jnp.shape(array))
        return Padded(array, dims, is_computed)

    @property
    def lengths(self) -> set[Length]:
        """The lengths among the factors of its dims."""
        return {f for dim in self.dims for f in dim if isinstance(f, Length)}

    @property
    def num_elements(self) -> int:
        """The number of elements, padding included."""
        return math.prod(jnp.shape(self.array))

    def along(self, d: int) -> Length | None:
        """Return the length that a dim is; None if it is none, or a product."""
        dim = self.dims[d]
        return dim[0] if len(dim) == 1 and isinstance(dim[0], Length) else None

    def as_dim(self, d: int, dim: Factors, *, zeros: bool = False) -> Padded:
        """Return the array with another dim of the same elements that count.

        Args:
          d: the dim's number.
          dim: the dim as it shall be; factors of the same sizes.
          zeros: whether padding is zeros, and not the last element again.
        """
        if dim == self.dims[d]:
            return self
        assert [*map(size_of, dim)] == [*map(size_of, self.dims[d])], (dim, self.dims[d])
        array, have = self.array, list(self.dims[d])
        for k, want in enumerate(dim):
            array = _resized(array, d, have, k, held_of(want), zeros=zeros)
            have[k] = want
        dims = (*self.dims[:d], dim, *self.dims[d + 1 :])
        return dataclasses.replace(self, array=array, dims=dims)

    def as_dims(self, dims: Sequence[Factors], *, zeros: bool = False) -> Padded:
        """Return the array with other dims of the same elements that count."""
        found = self
        for d, dim in enumerate(dims):
            found = found.as_dim(d, dim, zeros=zeros)
        return found

    def without(self, lengths: Container[Length]) -> Padded:
        """Return the array without the padding of some lengths."""
        return self.as_dims(
            [
                tuple(f.size if isinstance(f, Length) and f in lengths else f for f in dim)
                for dim in self.dims
            ]
        )

    def unpadded(self) -> Padded:
        """Return the array without padding."""
        return self.without(self.lengths)

    def filled(self, d: int, k: int, fill: Any) -> Padded:
        """Return the array with other padding along one factor of a dim."""
        factor = self.dims[d][k]
        if held_of(factor) == size_of(factor):
            return self
        shape, sizes = jnp.shape(self.array), [*map(held_of, self.dims[d])]
        counts = lax.iota(jnp.int32, sizes[k]) < size_of(factor)
        if len(sizes) > 1:
            counts = lax.broadcast_in_dim(counts, sizes, (k,)).reshape(-1)
        counts = lax.broadcast_in_dim(counts, shape, (d,))
        found = jnp.where(counts, self.array, jnp.asarray(fill, self.array.dtype))
        return dataclasses.replace(self, array=found)


def _resized(
    array: jax.Array, d: int, dim: Sequence[Factor], k: int, held: int, *, zeros: bool
) -> jax.Array:
    """Return an array with another number of elements along one factor of a dim."""
    have, size = held_of(dim[k]), size_of(dim[k])
    if have == held:
        return array
    shape = array.shape
    outer, inner = (math.prod(map(held_of, each)) for each in (dim[:k], dim[k + 1 :]))
    at = d
    if len(dim) > 1:
        array, at = array.reshape(*shape[:d], outer, have, inner, *shape[d + 1 :]), d + 1
    if held < have:
        array = lax.slice_in_dim(array, 0, held, axis=at)
    if held > have:
        # A lookup, and no concatenation: the new dim is of one piece, and can be split.
        places = lax.iota(jnp.int32, held)
        array = jnp.take(array, places, axis=at, mode="clip")
        if zeros:
            counts = lax.broadcast_in_dim(places < size, array.shape, (at,))
            array = jnp.where(counts, array, jnp.zeros_like(array))
    return array.reshape(*shape[:d], outer * held * inner, *shape[d + 1 :])
