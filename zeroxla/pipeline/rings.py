"""Rings of slots for packed arrays: what a rank keeps from one tick to a later one."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.pipeline.schedule import NONE
from zeroxla.pipeline.stage_buffers import Packing
from zeroxla.pipeline.stage_moves import Buffers


def make_ring(packing: Packing, num_slots: int) -> Buffers:
    """Return empty slots."""
    return [jnp.zeros((num_slots, size), dtype) for size, dtype in packing.buffers]


def write(ring: Buffers, slot: jax.Array, buffers: Buffers) -> Buffers:
    """Write packed arrays to a slot."""
    return [
        lax.dynamic_update_index_in_dim(slots, x, slot, 0)
        for slots, x in zip(ring, buffers, strict=True)
    ]


def write_arrivals(
    ring: Buffers, slots: Mapping[int, jax.Array], arrivals: Mapping[int, Buffers]
) -> Buffers:
    """Write what arrives by each hop to its slot; to the last one, which nobody reads, if that is
    none."""
    for hop, buffers in arrivals.items():
        if ring:
            last = ring[0].shape[0] - 1
            ring = write(ring, jnp.where(slots[hop] == NONE, last, slots[hop]), buffers)
    return ring


def read(ring: Buffers, slot: jax.Array) -> Buffers:
    """Return the packed arrays in a slot."""
    return [lax.dynamic_index_in_dim(slots, slot, keepdims=False) for slots in ring]
