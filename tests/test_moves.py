"""Global arrays from one sharding to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zeroxla.hosts.moves import hops_to_whole, mover, whole
from zeroxla.inspect import comms
from zeroxla.mesh import LEAF_AXES


@pytest.mark.parametrize(
    "spec", [PartitionSpec(LEAF_AXES), PartitionSpec(None, LEAF_AXES), PartitionSpec()]
)
def test_a_leaf_becomes_whole_in_two_hops(spec, mesh24):
    x = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    leaf = jax.device_put(x, NamedSharding(mesh24, spec))
    for shard in whole(leaf).addressable_shards:
        np.testing.assert_array_equal(shard.data, x)

    sent, at = [], leaf.sharding
    for sharding in hops_to_whole(leaf.sharding):
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=at)
        sent.append(
            {(r.axis, r.kind) for r in comms(mover(sharding).lower(shape).compile(), mesh24).rows}
        )
        at = sharding
    hops = [{("node", "all-gather")}, {("device", "all-gather")}]
    assert sent == ([set(), set()] if spec == PartitionSpec() else hops)
