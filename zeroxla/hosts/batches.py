"""Global batches from what each process has read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.hosts.moves import mover
from zeroxla.mesh import BATCH_AXES
from zeroxla.placement import leaf_path


def process_shard(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count): this process reads part `index` of `count` of every global batch.

    The parts are equal, and in the order of the mesh, which need not be that of the processes.

    Raises:
      ValueError: this process has no device in the mesh.
    """
    order = list(dict.fromkeys(d.process_index for d in mesh.devices.flat))
    if jax.process_index() not in order:
        raise ValueError(
            f"process {jax.process_index()} has no device in the mesh; make one of all hosts"
        )
    return order.index(jax.process_index()), len(order)


def global_batch(rows: Any, mesh: Mesh) -> Any:
    """Make the global batch, of which this process has its own rows.

    Args:
      rows: pytree of host arrays, leading dim the global batch / number of processes: the rows of
        part `process_shard(mesh)`.
      mesh: the step's mesh.

    Returns:
      A pytree of global arrays, leading dim the global batch, split over `node` and `device`.
      Nothing travels between hosts.

    Raises:
      ValueError: the rows do not divide over this process' devices.

    >>> import zeroxla
    >>> mesh = zeroxla.make_mesh(nodes=1)
    >>> rows = np.zeros((mesh.size, 33), np.int32)
    >>> zeroxla.global_batch({"tokens": rows}, mesh)["tokens"].shape == rows.shape
    True
    """
    _, count = process_shard(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    local = mesh.size // count

    def one(path: Any, x: Any) -> jax.Array:
        x = np.asarray(x)
        if not x.shape or x.shape[0] % local:
            raise ValueError(
                f"the batch leaf {leaf_path(path)!r} has the shape {x.shape}, and its rows do not "
                f"divide over the {local} devices of this process"
            )
        shape = (x.shape[0] * count, *x.shape[1:])
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree_util.tree_map_with_path(one, rows)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Return a checked batch on the mesh, split over its rows; shapes become zeros.

    Raises:
      ValueError: it holds host arrays, and there are several processes.
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def one(path: Any, x: Any) -> jax.Array:
        if isinstance(x, jax.ShapeDtypeStruct):
            x = np.zeros(x.shape, x.dtype)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        if not isinstance(x, jax.Array) or x.sharding.device_set != sharding.device_set:
            raise ValueError(
                f"the batch leaf {leaf_path(path)!r} is an array of this process alone, and there "
                f"are {jax.process_count()} processes; make the batch of the rows that each has "
                "read, with zeroxla.global_batch(rows, mesh)"
            )
        return x if x.sharding.is_equivalent_to(sharding, x.ndim) else mover(sharding)(x)

    return jax.tree_util.tree_map_with_path(one, batch)


def put_key(key: jax.Array, mesh: Mesh) -> jax.Array:
    """Return a PRNG key, which all processes have alike, on every device of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(key, sharding)
    wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return jax.jit(wrap, out_shardings=sharding)(np.asarray(jax.random.key_data(key)))
