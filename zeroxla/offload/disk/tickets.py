"""Tickets: small arrays that stand for parameters on disk in a compiled program, until it reads
them.

A ticket has the rank of its leaf, with the leaf's length along layer dims and length 1 along the
others. So a loop slices it as it would slice the leaf. Each element is the number of a layer; a
leaf without layers has one element. Tickets are the same on all devices.

A ticket is told from a leaf by its dtype, which no parameter has. A type of its own would not
survive: a traced program sees only arrays, and a pytree node in a leaf's place would change the
structure of the parameters. `Placement.is_on_disk` does not tell them apart either, as it also
holds where such a leaf is an array: while a state is made, before it is written.
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

# By the dtype of a leaf, the dtype of its tickets. No parameter has one of these.
_TICKET_DTYPE = {np.dtype("float32"): np.dtype("int32"), np.dtype("uint8"): np.dtype("uint32")}
_LEAF_DTYPE = {ticket: leaf for leaf, ticket in _TICKET_DTYPE.items()}


def is_ticket(x: Any) -> bool:
    """Return whether a parameter, or its shape, is a ticket."""
    return np.dtype(x.dtype) in _LEAF_DTYPE


def leaf_dtype(x: Any) -> np.dtype:
    """Return the dtype of a parameter, or of the parameter that a ticket stands for."""
    return _LEAF_DTYPE.get(np.dtype(x.dtype), np.dtype(x.dtype))


def spec_of(x: Any, placement: Placement) -> PartitionSpec:
    """Return the partition spec of a parameter, or of its ticket."""
    return PartitionSpec() if is_ticket(x) else placement.spec


def ticket_shapes(leaves: Sequence[tuple[Any, Placement]]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the tickets of leaves that are on disk."""
    found = []
    for x, placement in leaves:
        dims = placement.layer_dims
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        shape = tuple(n if d in dims else 1 for d, n in enumerate(placement.shape))
        dtype = _TICKET_DTYPE[np.dtype(x.dtype)]
        found.append(jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere))
    return found


def make_tickets(shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return the tickets, whose elements are numbered from 0 on, across all of them."""
    sizes = [math.prod(x.shape) for x in shapes]
    starts = itertools.accumulate([0, *sizes])
    arrays = []
    for x, size, start in zip(shapes, sizes, starts, strict=False):
        numbers = np.arange(start, start + size).reshape(x.shape).astype(x.dtype)
        arrays.append(jax.make_array_from_callback(x.shape, x.sharding, lambda i, n=numbers: n[i]))
    return arrays
