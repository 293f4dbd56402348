"""Packs the stages' arrays, which have different shapes, into buffers of the same shapes.

All stages run one program over the axis `pipe`, so the arrays that it carries must have the same
shapes on each. If every stage has an array of some size and dtype, it gets a buffer of its own,
which is read without a copy. All other arrays lie end to end in one buffer for each dtype, as long
as the longest stage needs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

SizeAndDtype = tuple[int, jnp.dtype]
"""The number of elements of an array or buffer, and its dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BufferSpan:
    """The elements of a buffer that hold one array of a stage.

    Attributes:
      buffer: the number of the buffer.
      offset: the place of the array's first element in the buffer.
      shape: the array's shape.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Packs the arrays of any stage into buffers, and unpacks them.

    Attributes:
      buffers: the size and dtype of each buffer.
      spans: for each stage, the span of each of its arrays, in order.
    """

    buffers: tuple[SizeAndDtype, ...]
    spans: tuple[tuple[BufferSpan, ...], ...]

    def pack(self, stage: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the buffers that hold a stage's arrays, with zeros elsewhere."""
        found = self.zeros()
        parts: dict[int, list[jax.Array]] = collections.defaultdict(list)
        for span, x in zip(self.spans[stage], arrays, strict=True):
            parts[span.buffer].append(x.reshape(-1))
        for i, mine in parts.items():
            rest = self.buffers[i][0] - sum(x.size for x in mine)
            mine += [jnp.zeros(rest, self.buffers[i][1])] if rest else []
            found[i] = jnp.concatenate(mine) if len(mine) > 1 else mine[0]
        return found

    def add(
        self, stage: int, buffers: Sequence[jax.Array], arrays: Mapping[int, jax.Array]
    ) -> list[jax.Array]:
        """Return buffers of a stage with arrays added, each by its number among the stage's."""
        spans = self.spans[stage]
        if len(arrays) == len(spans):
            more = self.pack(stage, [arrays[i] for i in range(len(spans))])
            return [x + y for x, y in zip(buffers, more, strict=True)]
        found = list(buffers)
        for i, x in arrays.items():
            buffer, start = spans[i].buffer, spans[i].offset
            whole = found[buffer]
            sum_here = jax.lax.slice_in_dim(whole, start, start + x.size) + x.reshape(-1)
            found[buffer] = jax.lax.dynamic_update_slice_in_dim(whole, sum_here, start, 0)
        return found

    def unpack(self, stage: int, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the arrays of a stage, read from the buffers."""
        found = []
        for span in self.spans[stage]:
            x, size = buffers[span.buffer], math.prod(span.shape)
            if size != x.size:
                x = jax.lax.slice_in_dim(x, span.offset, span.offset + size)
            found.append(x.reshape(span.shape))
        return found

    def zeros(self) -> list[jax.Array]:
        """Return buffers of zeros."""
        return [jnp.zeros(size, dtype) for size, dtype in self.buffers]


def make_packing(stages: Sequence[Sequence[jax.ShapeDtypeStruct]]) -> Packing:
    """Plan the buffers.

    Args:
      stages: for each stage, the shapes and dtypes of its arrays.

    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> make_packing([[f32(2, 3), f32(5)], [f32(6)]]).buffers
    ((6, dtype('float32')), (5, dtype('float32')))
    """
    counts = [collections.Counter(map(_size_and_dtype, arrays)) for arrays in stages]
    common = counts[0].copy()
    for count in counts[1:]:
        common &= count
    buffers: list[SizeAndDtype] = sorted(common.elements(), key=lambda k: (-k[0], str(k[1])))
    firsts: dict[SizeAndDtype, int] = {}  # the first of the buffers of a kind
    for i, kind in enumerate(buffers):
        firsts.setdefault(kind, i)
    shared: dict[jnp.dtype, int] = {}  # the buffer that the other arrays share, by dtype
    lengths: dict[int, int] = {}
    spans = []
    for arrays in stages:
        used: collections.Counter[SizeAndDtype] = collections.Counter()
        ends: dict[int, int] = collections.defaultdict(int)
        mine = []
        for x in arrays:
            kind = _size_and_dtype(x)
            if used[kind] < common[kind]:
                buffer, offset = firsts[kind] + used[kind], 0
                used[kind] += 1
            else:
                buffer = shared.setdefault(kind[1], len(buffers) + len(shared))
                offset = ends[buffer]
                ends[buffer] += kind[0]
                lengths[buffer] = max(lengths.get(buffer, 0), ends[buffer])
            mine.append(BufferSpan(buffer=buffer, offset=offset, shape=tuple(x.shape)))
        spans.append(tuple(mine))
    rest = [(lengths[i], dtype) for dtype, i in shared.items()]
    return Packing(buffers=(*buffers, *rest), spans=tuple(spans))


def _size_and_dtype(x: jax.ShapeDtypeStruct) -> SizeAndDtype:
    return math.prod(x.shape), jnp.dtype(x.dtype)
