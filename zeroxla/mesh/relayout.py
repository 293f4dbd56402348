"""Moves global arrays from one sharding to another, where each process holds only a part."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.mesh.axes import DEVICE, NODE, PIPE


@functools.cache
def mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a jitted function that gives this sharding to an array on the same devices."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def hops_to_whole(sharding: NamedSharding) -> list[NamedSharding]:
    """Return the shardings that a leaf passes through until it is whole on every device.

    They lose an axis at a time: first `pipe`, then `node`, then `device`. So each byte travels
    between hosts once, or once for each of several stages on a host.
    """
    # The spec of a program's result may lack axes of length 1, and be a bare name if one is left.
    spec = [(names,) if isinstance(names, str) else names or () for names in sharding.spec]
    found = []
    for axis in (PIPE, NODE, DEVICE):
        if any(axis in names for names in spec):
            spec = [tuple(name for name in names if name != axis) for names in spec]
            found.append(
                NamedSharding(sharding.mesh, PartitionSpec(*(names or None for names in spec)))
            )
    return found


def whole(x: jax.Array) -> jax.Array:
    """Return a leaf that is whole on every device. All processes must call this."""
    assert isinstance(x.sharding, NamedSharding)
    for sharding in hops_to_whole(x.sharding):
        x = mover(sharding)(x)
    return x
