"""Exchanges the wires of a unit between the devices of a hop, in one collective."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from zeroxla.wire.wire import Wire

JOINED_BYTES = 2**28
"""Wires up to so many bytes travel in one collective."""


def exchange(wires: Sequence[Wire], axis: str | tuple[str, ...], length: int) -> list[Wire]:
    """Send each device of a hop its rows: turn this device's [R] wires into [L, R / L] wires, R / L
    from each of the L devices.

    The wires of several bundles travel end to end in one collective, up to JOINED_BYTES of them. To
    join and cut them moves bytes, a quarter or an eighth of those of the gradients.
    """
    groups: list[list[Wire]] = []
    room = 0
    for wire in wires:
        if wire.buffer.size > room:
            groups.append([])
            room = JOINED_BYTES
        groups[-1].append(wire)
        room -= wire.buffer.size
    arrived = []
    for group in groups:
        parts = [wire.buffer.reshape(length, -1, wire.buffer.shape[-1]) for wire in group]
        buffer = jnp.concatenate(parts, axis=2)
        buffer = lax.all_to_all(buffer, axis, split_axis=0, concat_axis=0, tiled=True)
        ends = list(itertools.accumulate(part.shape[2] for part in parts))
        for wire, part, end in zip(group, parts, ends, strict=True):
            mine = lax.slice_in_dim(buffer, end - part.shape[2], end, axis=2)
            arrived.append(dataclasses.replace(wire, buffer=mine))
    return arrived
