"""Wires under jit, vmap, scan, shard_map and custom_vjp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tools.quantize_cases import quantized, restored, sample
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.quantize import Wire, WireFormat, dequantize, quantize

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMAT = WireFormat(block=32)
SIZE = 80


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(sample("normal", SIZE))


@pytest.fixture(scope="module")
def wire(x):
    return quantized(x, FORMAT)


@pytest.fixture(scope="module")
def values(wire):
    return np.asarray(restored(wire, (SIZE,), "float32"))


@pytest.mark.smoke
def test_a_wire_is_a_pytree_of_one_buffer(wire):
    (leaf,), treedef = jax.tree.flatten(wire)
    assert leaf is wire.buffer
    again = jax.tree.unflatten(treedef, [leaf])
    assert (again.size, again.format) == (SIZE, FORMAT)
    ((path, _),) = jax.tree.leaves_with_path(wire)
    assert jax.tree_util.keystr(path) == ".buffer"
    # Wires of another size or format have another structure: jit compiles again for them.
    for other in (Wire(leaf, SIZE - 1, FORMAT), Wire(leaf, SIZE, WireFormat(block=16))):
        assert jax.tree.structure(other) != treedef


@pytest.mark.smoke
def test_a_wire_passes_through_jit(x, wire, values):
    passed = jax.jit(lambda wire: wire)(wire)
    assert (passed.size, passed.format) == (SIZE, FORMAT)
    np.testing.assert_array_equal(passed.buffer, wire.buffer)

    @jax.jit
    def both(x):
        wire = quantize(x, FORMAT)
        return wire, dequantize(wire, x.shape)

    got, restored_ = both(x)
    np.testing.assert_array_equal(got.buffer, wire.buffer)
    np.testing.assert_array_equal(restored_, values)


def test_shapes_are_known_without_running(x):
    wire = jax.eval_shape(lambda x: quantize(x, FORMAT), x)
    assert wire.buffer.shape == (FORMAT.num_bytes(SIZE),)
    assert wire.buffer.dtype == jnp.uint8
    out = jax.eval_shape(lambda wire: dequantize(wire, (8, 10), jnp.bfloat16), wire)
    assert (out.shape, out.dtype) == ((8, 10), jnp.bfloat16)


def test_vmap_gives_a_wire_for_each_row(x, wire):
    rows = jnp.stack([x, 2 * x, x[::-1]])
    wires = jax.jit(jax.vmap(lambda row: quantize(row, FORMAT)))(rows)
    assert wires.buffer.shape == (3, FORMAT.num_bytes(SIZE))
    np.testing.assert_array_equal(wires.buffer[0], wire.buffer)
    np.testing.assert_array_equal(wires.buffer[2], quantized(x[::-1], FORMAT).buffer)


def test_scan_quantizes_layer_by_layer_and_carries_a_wire(x, wire, values):
    layers = jnp.stack([x, x[::-1], x])

    def layer(carry, row):
        return quantize(row, FORMAT), dequantize(carry, (SIZE,))

    last, found = jax.jit(lambda layers: jax.lax.scan(layer, wire, layers))(layers)
    np.testing.assert_array_equal(last.buffer, wire.buffer)
    reverse = restored(quantized(x[::-1], FORMAT), (SIZE,), "float32")
    np.testing.assert_array_equal(found, [values, values, reverse])


@pytest.mark.parametrize("check_vma", thinned([True], slow=[False]))
def test_a_collective_inside_shard_map_moves_wires(mesh24, x, check_vma):
    """Every device quantizes its shard, and one all_gather of bytes brings everybody's."""
    rows = jnp.stack([x * (i + 1) for i in range(8)])
    both = PartitionSpec(("node", "device"))

    def gather(shard):
        wire = quantize(shard[0], FORMAT)
        wires = Wire(jax.lax.all_gather(wire.buffer, *both), wire.size, wire.format)
        return dequantize(wires, (1, SIZE))

    run = jax.shard_map(gather, mesh=mesh24, in_specs=both, out_specs=both, check_vma=check_vma)
    found = jax.jit(run)(rows).reshape(8, 8, SIZE)
    expected = [restored(quantized(row, FORMAT), (SIZE,), "float32") for row in rows]
    for of_device in found:
        np.testing.assert_array_equal(of_device, expected)


def test_a_custom_vjp_spans_both(x, values):
    @jax.custom_vjp
    def through(x):
        return dequantize(quantize(x, FORMAT), x.shape)

    through.defvjp(lambda x: (through(x), None), lambda _, g: (g,))

    @jax.jit
    def run(x):
        return through(x), jax.grad(lambda x: (through(x) ** 2).sum())(x)

    found, gradient = run(x)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(gradient, 2 * values)
