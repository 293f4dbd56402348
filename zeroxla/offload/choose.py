"""Which arrays are offloaded, as placements say it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zeroxla.config.offload import Offload, memory_of
from zeroxla.mesh.placement import Placement

Both = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def offloaded(
    offload: Offload, params: Sequence[Placement], opt_state: Sequence[Placement]
) -> Both:
    """Return the placements with what is offloaded in its place.

    Arrays that every device has whole stay: each is smaller than one element a device. Of the
    others, each kind by itself, the first ones are offloaded up to `ratio` of the elements.
    """
    return (
        _moved(params, memory_of(offload.params), offload.ratio),
        _moved(opt_state, memory_of(offload.optimizer), offload.ratio),
    )


def _moved(
    placements: Sequence[Placement], memory: str | None, ratio: float
) -> tuple[Placement, ...]:
    sizes = [0 if p.dim is None else math.prod(p.shape) for p in placements]
    room = ratio * sum(sizes)
    found, moved = [], 0
    for placement, size in zip(placements, sizes, strict=True):
        # Half of a leaf over is nearer than half of it short.
        if memory is not None and size and moved + size / 2 <= room:
            moved += size
            placement = dataclasses.replace(placement, memory=memory)
        found.append(placement)
    return tuple(found)
