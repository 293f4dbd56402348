"""Arrays of stages that do not look alike, in buffers that do.

A program over the axis `pipe` is one for all stages, so what it carries has the same shapes on
each. Arrays that every stage has, by size and dtype, get a buffer each, which is read without a
copy; the others lie end to end in one buffer for each dtype, as long as the longest stage needs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Kind = tuple[int, jnp.dtype]
"""Elements and dtype of an array."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an array of a stage lies.

    Attributes:
      buffer: which.
      offset: of its first element.
      shape: of the array.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The buffers, and the place of every array of every stage.

    Attributes:
      buffers: elements and dtype of each.
      places: by stage, of each array, in order.
    """

    buffers: tuple[Kind, ...]
    places: tuple[tuple[Place, ...], ...]

    def pack(self, stage: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the buffers with the arrays of a stage, and zeros elsewhere."""
        found = self.zeros()
        parts: dict[int, list[jax.Array]] = collections.defaultdict(list)
        for place, x in zip(self.places[stage], arrays, strict=True):
            parts[place.buffer].append(x.reshape(-1))
        for i, mine in parts.items():
            rest = self.buffers[i][0] - sum(x.size for x in mine)
            mine += [jnp.zeros(rest, self.buffers[i][1])] if rest else []
            found[i] = jnp.concatenate(mine) if len(mine) > 1 else mine[0]
        return found

    def unpack(self, stage: int, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays of a stage."""
        found = []
        for place in self.places[stage]:
            x, size = buffers[place.buffer], math.prod(place.shape)
            if size != x.size:
                x = jax.lax.slice_in_dim(x, place.offset, place.offset + size)
            found.append(x.reshape(place.shape))
        return found

    def zeros(self) -> list[jax.Array]:
        """Return empty buffers."""
        return [jnp.zeros(size, dtype) for size, dtype in self.buffers]


def make_packing(stages: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> Packing:
    """Give the arrays of every stage their places.

    Args:
      stages: shapes and dtypes, by stage.

    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> make_packing([[f32(2, 3), f32(5)], [f32(6)]]).buffers
    ((6, dtype('float32')), (5, dtype('float32')))
    """
    counts = [collections.Counter(map(_kind, arrays)) for arrays in stages]
    common = counts[0].copy()
    for count in counts[1:]:
        common &= count
    buffers: list[Kind] = sorted(common.elements(), key=lambda k: (-k[0], str(k[1])))
    firsts: dict[Kind, int] = {}
    for i, kind in enumerate(buffers):
        firsts.setdefault(kind, i)
    shared: dict[jnp.dtype, int] = {}  # the buffer of the rest, by dtype
    lengths: dict[int, int] = {}
    places = []
    for arrays in stages:
        used: collections.Counter[Kind] = collections.Counter()
        ends: dict[int, int] = collections.defaultdict(int)
        mine = []
        for x in arrays:
            kind = _kind(x)
            if used[kind] < common[kind]:
                buffer, offset = firsts[kind] + used[kind], 0
                used[kind] += 1
            else:
                buffer = shared.setdefault(kind[1], len(buffers) + len(shared))
                offset = ends[buffer]
                ends[buffer] += kind[0]
                lengths[buffer] = max(lengths.get(buffer, 0), ends[buffer])
            mine.append(Place(buffer=buffer, offset=offset, shape=tuple(x.shape)))
        places.append(tuple(mine))
    rest = [(lengths[i], dtype) for dtype, i in shared.items()]
    return Packing(buffers=(*buffers, *rest), places=tuple(places))


def _kind(x: jax.ShapeDtypeStruct) -> Kind:
    return math.prod(x.shape), jnp.dtype(x.dtype)
