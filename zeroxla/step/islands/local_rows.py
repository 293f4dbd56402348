"""The bytes of arrays that a process has on its devices, and arrays of such bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def local_rows(x: jax.Array) -> np.ndarray:
    """Return the rows of an array [devices, ...] that are on this process' devices."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def as_rows(rows: np.ndarray, like: jax.Array) -> jax.Array:
    """Put rows on this process' devices, split like another array [devices, ...]."""
    shape = (like.shape[0], *rows.shape[1:])
    return jax.make_array_from_process_local_data(like.sharding, rows, shape)


def checksum(bits: jax.Array) -> int:
    """Return one number for the sums of bits of this process' devices, uint32 [devices]."""
    return int(local_rows(bits).astype(np.uint64).sum())


def checksum_of(x: jax.Array) -> int:
    """Return the checksum of the float32 rows [devices, size] on this process' devices."""
    bits = local_rows(x).view(np.uint32)
    places = 2 * np.arange(bits.shape[1], dtype=np.uint32) + 1
    return int((bits * places).sum(1, dtype=np.uint32).astype(np.uint64).sum())


def to_bytes(arrays: Sequence[jax.Array]) -> bytes:
    """Return what this process has of arrays, each shard once."""
    return b"".join(np.asarray(data).tobytes() for x in arrays for _, data in _shards(_raw(x)))


def num_bytes(arrays: Sequence[jax.Array]) -> int:
    """Return the length of `to_bytes`."""
    return sum(data.nbytes for x in arrays for _, data in _shards(_raw(x)))


def from_bytes(data: bytes, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Return arrays of the bytes of `to_bytes`, made in the process of the same number of another
    island; each has shape, dtype and sharding of an array here.

    Raises:
      ValueError: the bytes have another length.
    """
    if len(data) != num_bytes(like):
        raise ValueError(
            f"{len(data)} bytes came, and {num_bytes(like)} are due: the other island has other "
            "options"
        )
    found, at = [], 0
    for x in like:
        raw, pieces = _raw(x), {}
        for index, shard in _shards(raw):
            flat = np.frombuffer(data, shard.dtype, shard.size, at)
            pieces[index] = flat.reshape(shard.shape)
            at += shard.nbytes
        own = [
            jax.device_put(
                pieces[_place(shard.index)],
                jax.sharding.SingleDeviceSharding(
                    shard.device, memory_kind=raw.sharding.memory_kind
                ),
            )
            for shard in raw.addressable_shards
        ]
        made = jax.make_array_from_single_device_arrays(raw.shape, raw.sharding, own)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        found.append(
            jax.random.wrap_key_data(made, impl=jax.random.key_impl(x)) if is_key else made
        )
    return found


def _raw(x: jax.Array) -> jax.Array:
    """Return an array's numbers; those of a PRNG key are its data."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _place(index: tuple[slice, ...]) -> tuple[tuple[int, int | None], ...]:
    return tuple((s.start or 0, s.stop) for s in index)


def _shards(x: jax.Array) -> list[tuple[Any, jax.Array]]:
    """Return the shards on this process' devices by their place, each once, in order."""
    found = {_place(shard.index): shard.data for shard in x.addressable_shards}
    return sorted(found.items(), key=lambda pair: [(a, b or 0) for a, b in pair[0]])
