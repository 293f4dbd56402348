"""Makes global batches from the rows that each process has read, and puts batches on a mesh."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from zeroxla.mesh.axes import BATCH_AXES, as_auto, check_is_mesh, world_size
from zeroxla.mesh.processes.exchange import exchange
from zeroxla.mesh.relayout import mover
from zeroxla.program.paths import leaf_path

_compared: set[Mesh] = set()  # meshes whose first batch has been compared between processes


def process_shard(mesh: Mesh) -> tuple[int, int]:
    """Return (index, count): this process reads part `index` of `count` of every global batch.

    The rows of a batch are split over the (node, device) places of the mesh, whatever the order of
    its axes and of processes. All parts are equally large: as small as they can be while each
    process needs only one. Processes with other pipeline stages at the same places read the same
    part. So with one stage on each host, every host reads all rows.

    Raises:
      ValueError: it is no mesh of devices, or this process has no device in it.
    """
    check_is_mesh(mesh)
    _check_has_devices(mesh)
    places = _places(mesh)
    mine = places.get(jax.process_index())
    if mine is None:
        raise ValueError(
            f"process {jax.process_index()} has no device in the mesh; make one of all hosts"
        )
    world = len(set().union(*places.values()))
    for size in (n for n in range(1, world + 1) if world % n == 0):
        if all(len({place // size for place in each}) == 1 for each in places.values()):
            return min(mine) // size, world // size
    raise AssertionError(places)


def plain_batch(batch: Any) -> Any:
    """Return a batch in which mappings that JAX takes for leaves are dicts, such as a `UserDict` or
    the `BatchEncoding` of transformers."""
    return jax.tree.map(lambda x: plain_batch(dict(x)) if isinstance(x, Mapping) else x, batch)


def global_batch(rows: Any, mesh: Mesh) -> Any:
    """Make the global batch from the rows that each process has read.

    Args:
      rows: pytree of host arrays: this process's part `index` of `count`, see `process_shard`. The
        leading dim is the global batch / count.
      mesh: the step's mesh.

    Returns:
      A pytree of global arrays whose leading dim is the global batch, split over `node` and
      `device`. Nothing travels between hosts. `Step.place` splits it over further axes, too, where
      a step reads parts.

    Raises:
      ValueError: the rows do not divide over the devices that hold this part.

    >>> import zeroxla
    >>> mesh = zeroxla.make_mesh(nodes=1)
    >>> rows = np.zeros((mesh.size, 33), np.int32)
    >>> zeroxla.global_batch({"tokens": rows}, mesh)["tokens"].shape == rows.shape
    True
    """
    mesh, rows = as_auto(mesh, pipeline=True), plain_batch(rows)
    by_rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    return _made_of(rows, mesh, jax.tree.map(lambda _: by_rows, rows))


def placed_batch(rows: Any, mesh: Mesh, shardings: Any) -> Any:
    """Make the global batch from the rows that each process has read, with other shardings.

    The first batch on a mesh is also compared between processes that hold the same rows: each of
    them may place another part of these.

    Args:
      rows, mesh: as for `global_batch`; the mesh has Auto axes.
      shardings: a pytree like `rows`. They split rows over `node` and `device`, perhaps further
        over other axes, and other dims over any axes.

    Raises:
      ValueError: as `global_batch` and `put_batch`.
    """
    if jax.process_count() > 1 and mesh not in _compared:
        index, _ = process_shard(mesh)
        _compare({f"part {index}": map(np.asarray, jax.tree.leaves(rows))}, mesh)
        _compared.add(mesh)
    return _made_of(rows, mesh, shardings)


def _made_of(rows: Any, mesh: Mesh, shardings: Any) -> Any:
    index, count = process_shard(mesh)
    places = world_size(mesh) // count

    def one(path: Any, x: Any, sharding: NamedSharding) -> jax.Array:
        x = np.asarray(x)
        if not x.shape or x.shape[0] % places:
            part_of = f", part {index} of {count} of the batch," if count > 1 else ""
            raise ValueError(
                f"the batch leaf {leaf_path(path)!r} has the shape {x.shape}, and its rows"
                f"{part_of} do not divide over {places} (node, device) places of the mesh; use a "
                f"multiple of {places}"
            )
        x = in_dtype_of_jax(x, leaf_path(path))
        shape, skipped = (x.shape[0] * count, *x.shape[1:]), index * x.shape[0]

        def part(at: Any) -> np.ndarray:
            first, end, _ = at[0].indices(shape[0])
            return x[first - skipped : end - skipped, *at[1:]]

        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree_util.tree_map_with_path(one, rows, shardings)


def in_dtype_of_jax(x: np.ndarray, name: str) -> np.ndarray:
    """Return a host array in JAX's dtype for it: int32 for NumPy's int64.

    Args:
      x: the array.
      name: the path of the array in its batch, for messages.

    Raises:
      ValueError: a whole number does not fit.
    """
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if dtype != x.dtype and x.size and np.issubdtype(dtype, np.integer):
        least, most, limits = x.min(), x.max(), np.iinfo(dtype)
        if least < limits.min or most > limits.max:
            raise ValueError(
                f"the batch leaf {name!r} holds whole numbers from {least} to {most}, and {dtype} "
                f"holds those from {limits.min} to {limits.max}; correct the batch"
            )
    return x.astype(dtype, copy=False)


def put_batch(batch: Any, mesh: Mesh, shardings: Any) -> Any:
    """Put a batch on the mesh. Shapes become zeros.

    The first batch on a mesh is also compared between processes that hold the same rows.

    Args:
      batch: a pytree of arrays and shapes.
      mesh: the mesh.
      shardings: a pytree like `batch`, of shardings on the mesh.

    Raises:
      ValueError: the mesh has no devices; the batch holds host arrays, and there are several
        processes; or processes that hold the same rows were given different ones.
    """
    _check_has_devices(mesh)
    are_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(batch))

    def one(path: Any, x: Any, sharding: NamedSharding) -> jax.Array:
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

    put = jax.tree_util.tree_map_with_path(one, batch, shardings)
    if jax.process_count() > 1 and not are_shapes and mesh not in _compared:
        _compare(_shards_by_place(batch), mesh)  # as given, with all that a process has read
        _compared.add(mesh)
    return put


def put_key(key: jax.Array, mesh: Mesh) -> jax.Array:
    """Put a PRNG key on every device of the mesh. All processes must pass the same key.

    Raises:
      ValueError: the mesh has no devices.
    """
    _check_has_devices(mesh)
    sharding = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() == 1:
        return jax.device_put(key, sharding)
    wrap = functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(key))
    return jax.jit(wrap, out_shardings=sharding)(np.asarray(jax.random.key_data(key)))


def _check_has_devices(mesh: Mesh) -> None:
    """Check that a mesh has devices to compute on.

    Raises:
      ValueError: the mesh is abstract.
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"the mesh {dict(mesh.shape)} is abstract: a step on it is described and planned, not "
            "run; make a mesh of devices with zeroxla.make_mesh()"
        )


def _places(mesh: Mesh) -> dict[int, set[int]]:
    """Return, by process, the places of its devices along the batch's rows, counted node-major."""
    dims = [mesh.axis_names.index(axis) for axis in BATCH_AXES if axis in mesh.axis_names]
    places: dict[int, set[int]] = {}
    for at, device in np.ndenumerate(mesh.devices):
        place = 0
        for dim in dims:
            place = place * mesh.devices.shape[dim] + at[dim]
        places.setdefault(device.process_index, set()).add(place)
    return places


def _shards_by_place(batch: Any) -> dict[str, list[jax.Array]]:
    """Return this process's shards of a batch, by the place that they have in it."""
    found: dict[str, list[jax.Array]] = {}
    for x in jax.tree.leaves(batch):
        mine = {}
        for shard in x.addressable_shards:
            (first, end, _), *others = (
                at.indices(n) for at, n in zip(shard.index, x.shape, strict=True)
            )
            whole = all(at[:2] == (0, n) for at, n in zip(others, x.shape[1:], strict=True))
            part = "" if whole else f", part {[at[:2] for at in others]}"
            mine[f"rows {first} to {end - 1}{part}"] = shard.data
        for place, data in mine.items():
            found.setdefault(place, []).append(data)
    return found


def _compare(mine: Mapping[str, Iterable[Any]], mesh: Mesh) -> None:
    """Check that processes that hold the same rows of a batch have the same values.

    Args:
      mine: this process's arrays, by their place in the batch.
      mesh: the mesh.

    Raises:
      ValueError: the values differ.
    """
    places = _places(mesh)
    if sum(map(len, places.values())) == len(set().union(*places.values())):
        return  # no row is in two processes
    hashes: dict[str, str] = {}
    for place, arrays in mine.items():
        digest = hashlib.blake2b(digest_size=8)
        for x in arrays:
            digest.update(np.asarray(x).tobytes())
        hashes[place] = digest.hexdigest()
    says = json.dumps(hashes)
    said = [json.loads(text) for text in exchange("rows of a batch", says)]
    for rows in dict.fromkeys(rows for each in said for rows in each):
        found = {process: each[rows] for process, each in enumerate(said) if rows in each}
        if len(set(found.values())) > 1:
            raise ValueError(
                f"the processes {', '.join(map(str, found))} all have devices for {rows} of a "
                "batch, and read different ones; in each process give global_batch or step.place "
                "part `index` of `count`, as zeroxla.process_shard(mesh) says"
            )
