"""`offloaded`: chooses the arrays that are offloaded, and says so in their placements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zeroxla.config.offload import Offload, memory_of
from zeroxla.mesh.placement import Placement

StatePlacements = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""The placements of the parameters, and of the arrays of the optimizer's state."""


def offloaded(
    offload: Offload, params: Sequence[Placement], opt_state: Sequence[Placement]
) -> StatePlacements:
    """Return the placements, with the memory of each array that is offloaded.

    Arrays that every device holds whole stay on the devices: they have fewer elements than there
    are devices. Of the other parameters, and of the other optimizer arrays, the first ones are
    offloaded, up to `ratio` of their elements.
    """
    return (
        _first_moved(params, memory_of(offload.params), offload.ratio),
        _first_moved(opt_state, memory_of(offload.optimizer), offload.ratio),
    )


def _first_moved(
    placements: Sequence[Placement], memory: str | None, ratio: float
) -> tuple[Placement, ...]:
    sizes = [0 if p.dim is None else math.prod(p.shape) for p in placements]
    room = ratio * sum(sizes)
    found, moved = [], 0
    for placement, size in zip(placements, sizes, strict=True):
        # The share nearest to the ratio: a leaf moves if at least half of it fits.
        if memory is not None and size and moved + size / 2 <= room:
            moved += size
            placement = dataclasses.replace(placement, memory=memory)
        found.append(placement)
    return tuple(found)
