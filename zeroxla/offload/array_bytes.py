"""Counts the bytes of arrays on one device, in its memory, in its host's memory, or on disk."""

from __future__ import annotations

import math
from typing import Any

import jax

from zeroxla.offload.memory_kinds import Place, place_of


def shard_bytes(shapes: Any, *, place: Place = "device") -> int:
    """Sum the bytes of one device's shards of arrays, from shapes and shardings alone.

    Args:
      shapes: a pytree of arrays or ShapeDtypeStructs with shardings. PRNG keys count nothing.
      place: the place whose arrays are counted: "device", "host" or "disk".
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
        if place_of(x) == place and not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def array_bytes_per_device(tree: Any, *, place: Place = "device") -> dict[jax.Device, int]:
    """Sum the bytes that the live arrays of a pytree hold on each device of this process.

    Args:
      tree: a pytree, such as a `TrainState`. Leaves that are no `jax.Array` count nothing. An array
        that appears twice (tied leaves) counts once.
      place: the place whose arrays are counted: "device", or "host" for offloaded arrays.

    Returns:
      Bytes by device, for the devices that hold anything.

    Raises:
      RuntimeError: an array was donated or deleted; JAX raises this.
    """
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)}
    held: dict[jax.Device, int] = {}
    for array in arrays.values():
        if place_of(array) != place:
            continue
        for shard in array.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held
