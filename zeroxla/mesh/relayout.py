"""Global arrays from one sharding to another, with processes that hold only a part of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.mesh.axes import DEVICE, NODE, PIPE


@functools.cache
def mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function from an array of the sharding's devices to one split so."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def hops_to_whole(sharding: NamedSharding) -> list[NamedSharding]:
    """Return the shardings a leaf passes through to be whole on every device: axis by axis, first
    without `pipe`, then `node`, then `device`. So what travels between hosts does so once; with
    several stages on a host, once for each."""
    # Of what a program returns the spec may lack axes of length 1, and be a name if one is left.
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
    """Return a leaf whole on every device; all processes must call this."""
    assert isinstance(x.sharding, NamedSharding)
    for sharding in hops_to_whole(x.sharding):
        x = mover(sharding)(x)
    return x
