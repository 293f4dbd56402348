"""Placement: which dim is split, what padding, which device holds what."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.mesh.placement import Placement, place
from zeroxla.program.paths import leaf_path

SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)
WORLDS = st.sampled_from([1, 2, 6, 8, 384])


@pytest.mark.parametrize(
    ("shape", "world", "dim", "pad"),
    [
        ((768, 50257), 8, 0, 0),
        ((50257, 768), 8, 1, 0),
        ((50257, 13), 8, 0, 7),
        ((13, 50257), 8, 1, 7),
        ((50257, 64), 384, 0, 47),
        ((5, 7), 8, 1, 1),
        ((7, 5), 6, 1, 1),
        ((3, 3), 8, 0, 5),
        ((8,), 8, 0, 0),
        ((5,), 1, 0, 0),
        ((5, 2), 8, 0, 3),
    ],
)
def test_the_first_dim_that_divides_is_split_else_the_cheapest_padding(shape, world, dim, pad):
    assert place(shape, world) == Placement(shape=shape, dim=dim, pad=pad)


@pytest.mark.parametrize(
    ("shape", "world"),
    [((), 8), ((), 1), ((1,), 8), ((7,), 8), ((2, 3), 8), ((0, 9), 8), ((0,), 1), ((0, 3), 1)],
)
def test_fewer_elements_than_devices_stay_whole(shape, world):
    placement = place(shape, world)
    assert placement == Placement(shape=shape)
    assert placement.stored_shape == shape
    assert placement.spec == jax.sharding.PartitionSpec()


@given(shape=SHAPES, world=WORLDS, skip=st.sets(st.integers(0, 3)))
def test_placement_rules(shape, world, skip):
    placement = place(shape, world, skip=tuple(skip))
    if placement.dim is None:
        allowed = [n for d, n in enumerate(shape) if d not in skip and n]
        assert not allowed or math.prod(shape) < world
        return
    assert placement.dim not in skip
    assert placement.stored_shape[placement.dim] % world == 0
    assert 0 <= placement.pad < world
    wasted = math.prod(placement.stored_shape) - math.prod(shape)
    dims = [d for d in range(len(shape)) if d not in skip and shape[d]]
    costs = [math.prod(shape) // shape[d] * (-shape[d] % world) for d in dims]
    assert wasted == min(costs)


@settings(deadline=None, max_examples=20)  # JAX compiles each shape.
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), world=WORLDS)
def test_padding_is_appended_as_zeros_and_dropped(shape, world):
    placement = place(shape, world)
    natural = np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)
    stored = placement.stored(jnp.asarray(natural))
    assert stored.shape == placement.stored_shape
    np.testing.assert_array_equal(placement.natural(stored), natural)
    assert float(stored.sum()) == natural.sum()


@given(shape=st.lists(st.integers(1, 30), min_size=2, max_size=4).map(tuple), data=st.data())
def test_a_slice_of_a_stacked_leaf_is_placed_as_the_stack(shape, data):
    layer_dim = data.draw(st.integers(0, len(shape) - 1))
    placement = place(shape, 8, skip=(layer_dim,))
    inner = placement.unstack(layer_dim)
    assert inner.shape == shape[:layer_dim] + shape[layer_dim + 1 :]
    outer = list(placement.stored_shape)
    assert inner.stored_shape == tuple(n for d, n in enumerate(outer) if d != layer_dim)
    if placement.dim is not None:
        # The split dim is the same one, counted without the layer dim.
        names = [d for d in range(len(shape)) if d != layer_dim]
        assert names[inner.dim] == placement.dim


@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2), (1, 8), (8, 1), (3, 2), (1, 1)])
def test_shards_are_device_major(mesh_shape):
    nodes, devices = mesh_shape
    mesh = make_mesh(nodes=nodes, devices_per_node=devices)
    world = nodes * devices
    placement = place((2 * world, 3), world)
    assert placement.shard_shape(mesh) == (2, 3)
    where = placement.sharding(mesh).devices_indices_map((2 * world, 3))
    for node in range(nodes):
        for device in range(devices):
            index = device * nodes + node
            rows, _ = where[mesh.devices[node, device]]
            # One device alone is given slice(None).
            assert rows.indices(2 * world)[:2] == (2 * index, 2 * index + 2)


def test_leaf_paths_are_read_with_slashes():
    tree = {"h_0": {"attn": [1.0, {"kernel": 2.0}]}}
    paths = [leaf_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["h_0/attn/0", "h_0/attn/1/kernel"]
