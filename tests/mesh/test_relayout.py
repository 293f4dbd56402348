"""Global arrays from one sharding to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.inspect import comms
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.mesh.relayout import hops_to_whole, mover, whole


@pytest.mark.parametrize(
    ("pipe", "spec", "axes"),
    [
        (1, PartitionSpec(("device", "node")), ["node", "device"]),
        (1, PartitionSpec(None, ("device", "node")), ["node", "device"]),
        (1, PartitionSpec(), []),
        (2, PartitionSpec(None, "pipe"), ["pipe"]),
        (2, PartitionSpec(("device", "node", "pipe")), ["pipe", "node", "device"]),
    ],
)
def test_a_leaf_becomes_whole_axis_by_axis(pipe, spec, axes):
    mesh = make_mesh(pipe=pipe, nodes=2)
    x = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    leaf = jax.device_put(x, NamedSharding(mesh, spec))
    for shard in whole(leaf).addressable_shards:
        np.testing.assert_array_equal(shard.data, x)

    sent, at = [], leaf.sharding
    for sharding in hops_to_whole(leaf.sharding):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=at)
        rows = comms(mover(sharding).lower(shape).compile(), mesh).rows
        sent.append({(row.axis, row.kind) for row in rows})
        at = sharding
    assert sent == [{(axis, "all-gather")} for axis in axes]
