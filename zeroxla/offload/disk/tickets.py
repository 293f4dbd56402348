"""Tickets: what stands for a parameter on disk in a compiled program, until it is read there.

A ticket has the rank of its leaf, its length along the dims of layers and 1 along the others: a
loop slices it as it would the leaf. Each element is the number of a layer; a leaf without layers
has one. Tickets are the same on all devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.mesh.placement import Placement

# No parameter has these dtypes.
_TICKET_OF = {np.dtype("float32"): np.dtype("int32"), np.dtype("uint8"): np.dtype("uint32")}
_LEAF_OF = {ticket: leaf for leaf, ticket in _TICKET_OF.items()}


def is_ticket(x: Any) -> bool:
    """Return whether a parameter, or its shape, is a ticket."""
    return np.dtype(x.dtype) in _LEAF_OF


def leaf_dtype(x: Any) -> np.dtype:
    """Return the dtype of a parameter, or of what a ticket stands for."""
    return _LEAF_OF.get(np.dtype(x.dtype), np.dtype(x.dtype))


def spec_of(x: Any, placement: Placement) -> PartitionSpec:
    """Return how a parameter, or its ticket, is split."""
    return PartitionSpec() if is_ticket(x) else placement.spec


def ticket_shapes(leaves: Sequence[tuple[Any, Placement]]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the tickets of leaves that are on disk."""
    found = []
    for x, placement in leaves:
        dims = placement.layer_dims
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        shape = tuple(n if d in dims else 1 for d, n in enumerate(placement.shape))
        dtype = _TICKET_OF[np.dtype(x.dtype)]
        found.append(jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere))
    return found


def make_tickets(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return tickets, numbered from 0 on."""
    sizes = [math.prod(x.shape) for x in shapes]
    starts = itertools.accumulate([0, *sizes])
    arrays = []
    for x, size, start in zip(shapes, sizes, starts, strict=False):
        numbers = np.arange(start, start + size).reshape(x.shape).astype(x.dtype)
        arrays.append(jax.make_array_from_callback(x.shape, x.sharding, lambda i, n=numbers: n[i]))
    return arrays
