"""`Cut`: which part of a dim is wanted; and the blocks of arrays that follow from cuts.

A dim may be several flattened into one, as rows and positions are in `logits.reshape(-1, words)`.
A block of positions is not one run of such a dim, but one in each row. So a cut says how many
positions of other dims lie outside and inside of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.program.trace import Constant, Operand


class Cut(NamedTuple):
    """Says of one dim that a block of it is wanted.

    Attributes:
      label: what the dim counts, such as "query".
      first: the place of the label's position 0.
      outer: the number of positions of the dims that are flattened into this one before the label's
        own. 1: none.
      inner: the same of those after it.
    """

    label: str
    first: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_flat(self) -> bool:
        """Whether other dims are flattened into this one."""
        return self.outer * self.inner > 1

    def length(self, size: int) -> int:
        """Return the label's own length in a dim of a size."""
        return size // (self.outer * self.inner)


Cuts = tuple[Cut | None, ...]
"""The cuts of an array, one for each dim; None where a dim is whole."""

Window = Mapping[str, tuple[Any, int]]
"""By label: the block's first position, which may be traced, and its number of positions."""


def shape_of(operand: Operand) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return jnp.shape(operand.value) if isinstance(operand, Constant) else operand.aval.shape


def labels_of(cuts: Cuts) -> frozenset[str]:
    """Return the labels that cuts have."""
    return frozenset(cut.label for cut in cuts if cut is not None)


def has_flat(cuts: Cuts) -> bool:
    """Return whether other dims are flattened into a cut one."""
    return any(cut is not None and cut.is_flat for cut in cuts)


def block_shape(shape: Sequence[int], cuts: Cuts, window: Window) -> tuple[int, ...]:
    """Return the shape of a block."""
    pairs = zip(shape, cuts, strict=True)
    return tuple(
        n if cut is None else cut.outer * window[cut.label][1] * cut.inner for n, cut in pairs
    )


def sliced(x: jax.Array, cuts: Cuts, window: Window) -> jax.Array:
    """Return the block of an array."""
    for dim, cut in enumerate(cuts):
        if cut is None:
            continue
        first, size = window[cut.label]
        if isinstance(first, int) and first + cut.first == 0 and size == cut.length(x.shape[dim]):
            continue
        shape = x.shape
        x = lax.dynamic_slice_in_dim(_opened(x, dim, cut), first + cut.first, size, axis=dim + 1)
        x = x.reshape(*shape[:dim], cut.outer * size * cut.inner, *shape[dim + 1 :])
    return x


def placed(x: jax.Array, block: jax.Array, dim: int, cut: Cut, first: Any) -> jax.Array:
    """Return an array with a block in its place.

    Args:
      x: the array.
      block: the block, whole in all other dims.
      dim: the dim that is cut.
      cut: its cut.
      first: the block's first position, which may be traced.
    """
    opened, part = _opened(x, dim, cut), _opened(block, dim, cut)
    at = first + cut.first
    return lax.dynamic_update_slice_in_dim(opened, part, at, axis=dim + 1).reshape(x.shape)


def places(size: int, cut: Cut, length: int, window: Window) -> jax.Array:
    """Return the places in a whole dim that the elements of its block have, int32[block].

    Args:
      size: the dim's size in the block.
      cut: the dim's cut.
      length: the label's length in the whole dim, see `Cut.length`.
      window: the block.
    """
    first, num = window[cut.label]
    own = lax.iota(jnp.int32, size)
    outer, position, inner = own // (num * cut.inner), own // cut.inner % num, own % cut.inner
    return (outer * length + position + first + cut.first) * cut.inner + inner


def places_in_block(at: jax.Array, cut: Cut, length: int, window: Window) -> jax.Array:
    """Return the places in a block that places in the whole dim have: the inverse of `places`.

    Places that the block does not have become some that are out of its range, or wrong ones.
    """
    first, num = window[cut.label]
    if not cut.is_flat:
        return at - jnp.asarray(first + cut.first, at.dtype)
    outer, inner = at // (length * cut.inner), at % cut.inner
    position = at // cut.inner % length - jnp.asarray(first + cut.first, at.dtype)
    return (outer * num + position) * cut.inner + inner


def reshaped(cuts: Cuts, shape: Sequence[int], out: Sequence[int]) -> Cuts | None:
    """Return the cuts of an array after a reshape; None if a cut dim is divided by it.

    Args:
      cuts: the cuts before.
      shape: the shape before.
      out: the shape after.
    """
    found: list[Cut | None] = [None] * len(out)
    for d, cut in enumerate(cuts):
        if cut is None:
            continue
        length = cut.length(shape[d])
        before = math.prod(shape[:d]) * cut.outer
        after = cut.inner * math.prod(shape[d + 1 :])
        places = []
        for e, n in enumerate(out):
            outside, inside = math.prod(out[:e]), math.prod(out[e + 1 :])
            if before % max(outside, 1) == 0 and after % max(inside, 1) == 0:
                outer, inner = before // max(outside, 1), after // max(inside, 1)
                if n == outer * length * inner:
                    places.append((e, cut._replace(outer=outer, inner=inner)))
        if len(places) != 1 or found[places[0][0]] is not None:
            return None  # a dim of 1 may stand at several places
        found[places[0][0]] = places[0][1]
    return tuple(found)


def _opened(x: jax.Array, dim: int, cut: Cut) -> jax.Array:
    """Return an array with three dims in the place of one: those outside, the label's, those
    inside."""
    n = cut.length(x.shape[dim])
    return x.reshape(*x.shape[:dim], cut.outer, n, cut.inner, *x.shape[dim + 1 :])
