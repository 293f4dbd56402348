"""Global arrays from one sharding to another, with processes that hold only a part of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.mesh import DEVICE


@functools.cache
def mover(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function from an array of the sharding's devices to one split so."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def hops_to_whole(sharding: NamedSharding) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings a leaf passes through to be whole on every device: without `node`, then
    without `device`. So what travels between hosts does so once."""
    inside = PartitionSpec(*(DEVICE if names else None for names in sharding.spec))
    return NamedSharding(sharding.mesh, inside), NamedSharding(sharding.mesh, PartitionSpec())


def whole(x: jax.Array) -> jax.Array:
    """Return a leaf whole on every device; all processes must call this."""
    assert isinstance(x.sharding, NamedSharding)
    for sharding in hops_to_whole(x.sharding):
        x = mover(sharding)(x)
    return x
