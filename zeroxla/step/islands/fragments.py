"""Cuts the shards of a device into fragments: vectors of equal size that are exchanged alone.

The outer algorithm works element by element, so it need not know leaves. A device's shards, one
after another, are one vector; a fragment is a run of it. All devices cut alike, so a fragment is an
array [devices, size] of which each device holds one row.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run of the elements of one leaf's shard.

    Attributes:
      leaf: the number of the leaf.
      start, stop: the elements of its shard, flat.
    """

    leaf: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardFragment:
    """What a device exchanges at once.

    Attributes:
      runs: the elements, in order.
      size: their number, with zeros after them so that fragments are of equal size and share
        programs.
    """

    runs: tuple[Run, ...]
    size: int

    @property
    def leaves(self) -> tuple[int, ...]:
        """The numbers of the leaves that it has elements of."""
        return tuple(dict.fromkeys(run.leaf for run in self.runs))

    def take(self, shards: Mapping[int, jax.Array]) -> jax.Array:
        """Return the fragment of a device's shards of its leaves, float32 [size]."""
        found = [shards[run.leaf].reshape(-1)[run.start : run.stop] for run in self.runs]
        num_zeros = self.size - sum(run.stop - run.start for run in self.runs)
        return jnp.concatenate([*found, jnp.zeros(num_zeros, jnp.float32)])

    def put(self, shards: Mapping[int, jax.Array], vector: jax.Array) -> dict[int, jax.Array]:
        """Return a device's shards of its leaves with another fragment in them."""
        found, at = dict(shards), 0
        for run in self.runs:
            size = run.stop - run.start
            flat = found[run.leaf].reshape(-1).at[run.start : run.stop].set(vector[at : at + size])
            found[run.leaf] = flat.reshape(found[run.leaf].shape)
            at += size
        return found


def cut_fragments(shapes: Sequence[tuple[int, ...] | None], num: int) -> tuple[ShardFragment, ...]:
    """Cut a device's shards into fragments of equal size.

    Args:
      shapes: the shapes of a device's shards; None for a leaf that is not exchanged.
      num: the number of fragments.

    Raises:
      ValueError: there are more fragments than elements.
    """
    sizes = [0 if shape is None else math.prod(shape) for shape in shapes]
    total = sum(sizes)
    if num > total:
        raise ValueError(f"fragments={num}, and a device has {total} elements; take fewer")
    bounds = [total * i // num for i in range(num + 1)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    found = []
    for first, end in itertools.pairwise(bounds):
        runs = []
        for leaf, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            a, b = max(first, start), min(end, start + size)
            if a < b:
                runs.append(Run(leaf=leaf, start=a - start, stop=b - start))
        found.append(ShardFragment(runs=tuple(runs), size=-(-total // num)))
    return tuple(found)


def cut_by_units(
    shapes: Sequence[tuple[int, ...] | None], units: Sequence[str]
) -> tuple[ShardFragment, ...]:
    """Make a fragment of the leaves of each unit of the fetch plan.

    Args:
      shapes: the shapes of a device's shards; None for a leaf that is not exchanged.
      units: the name of each leaf's unit.
    """
    found: dict[str, list[Run]] = {}
    for leaf, (shape, unit) in enumerate(zip(shapes, units, strict=True)):
        if shape is not None:
            found.setdefault(unit, []).append(Run(leaf=leaf, start=0, stop=math.prod(shape)))
    return tuple(
        ShardFragment(runs=tuple(runs), size=sum(run.stop - run.start for run in runs))
        for runs in found.values()
    )
