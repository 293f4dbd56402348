"""Which arrays are offloaded, as placements say it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zeroxla.offload.options import Offload
from zeroxla.placement import Placement

Both = tuple[tuple[Placement, ...], tuple[Placement, ...]]


def offloaded(
    offload: Offload, params: Sequence[Placement], opt_state: Sequence[Placement]
) -> Both:
    """Return the placements with what is offloaded in host memory.

    Arrays that every device has whole stay: each is smaller than one element a device. Of the
    others, each kind by itself, the first ones are offloaded up to `ratio` of the elements.
    """
    return (
        _moved(params, offload) if offload.params == "host" else tuple(params),
        _moved(opt_state, offload) if offload.optimizer == "host" else tuple(opt_state),
    )


def _moved(placements: Sequence[Placement], offload: Offload) -> tuple[Placement, ...]:
    sizes = [0 if p.dim is None else math.prod(p.shape) for p in placements]
    room = offload.ratio * sum(sizes)
    found, moved = [], 0
    for placement, size in zip(placements, sizes, strict=True):
        # Half of a leaf over is nearer than half of it short.
        if size and moved + size / 2 <= room:
            moved += size
            placement = dataclasses.replace(placement, memory=offload.memory_kind)
        found.append(placement)
    return tuple(found)
