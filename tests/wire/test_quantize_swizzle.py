"""Swizzled wires: the partitions of an array in DeepSpeed's order, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import options, quantized, restored, sample
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.pallas_kernels.swizzle import Swizzle
from zeroxla.quantize import Wire, WireFormat, swizzled_quantize

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMAT = WireFormat(block=16)
SIZE = 37  # of a chunk

swizzled = jax.jit(swizzled_quantize, static_argnames=("format", "nodes", "devices", "chunks"))


@pytest.mark.smoke
def test_two_nodes_of_four_devices_are_in_deepspeeds_order():
    x = np.arange(1.0, 9.0, dtype=np.float32)
    wires = swizzled(x, FORMAT, nodes=2, devices=4)
    assert wires.buffer.shape == (1, 8, FORMAT.num_bytes(1))
    values = restored(wires, (), "float32")
    np.testing.assert_allclose(values[0] - 1, [0, 4, 1, 5, 2, 6, 3, 7], atol=0.04)
    expected = [partition for partition, _ in quantize_oracle.swizzled(2, 4, 1)]
    assert expected == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(
    ("nodes", "devices"), [(2, 4), (4, 2), (3, 2), (1, 8), (8, 1), (1, 1)], ids=str
)
def test_the_order_of_every_mesh(nodes, devices, chunks):
    swizzle = Swizzle(nodes=nodes, devices=devices, chunks=chunks)
    order = quantize_oracle.swizzled(nodes, devices, chunks)
    assert len(order) == swizzle.num_wires == nodes * devices * chunks
    sources = [partition * chunks + chunk for partition, chunk in order]
    np.testing.assert_array_equal(swizzle.sources(), sources)
    # `target` is the inverse, for arrays, integers and traced integers.
    np.testing.assert_array_equal(swizzle.target(np.array(sources)), np.arange(len(order)))
    assert [swizzle.target(wire) for wire in sources] == list(range(len(order)))


@pytest.mark.parametrize(
    ("nodes", "devices", "chunks"),
    thinned(
        [(2, 4, 1), (3, 2, 2)],
        slow=[
            (2, 4, 2),
            (2, 4, 3),
            (3, 2, 1),
            (3, 2, 3),
            *((1, 8, chunks) for chunks in (1, 2, 3)),
        ],
        rows=True,
    ),
)
def test_swizzled_wires_are_those_of_the_partitions(nodes, devices, chunks):
    size = nodes * devices * chunks * SIZE
    x = sample("normal", size)
    wires = swizzled(x, FORMAT, nodes=nodes, devices=devices, chunks=chunks)
    assert wires.buffer.shape == (chunks, nodes * devices, FORMAT.num_bytes(SIZE))
    assert (wires.size, wires.format) == (SIZE, FORMAT)
    parts = x.reshape(nodes * devices, chunks, SIZE)
    order = quantize_oracle.swizzled(nodes, devices, chunks)
    for found, (partition, chunk) in zip(wires.buffer.reshape(len(order), -1), order):
        expected = quantize_oracle.quantize(parts[partition, chunk], **options(FORMAT))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found, quantized(parts[partition, chunk], FORMAT).buffer)


@pytest.mark.parametrize("dtype", thinned(["bfloat16"], slow=["float16"]))
def test_an_array_of_any_shape_and_dtype(dtype):
    """4-bit codes, offsets, and blocks longer than a wire."""
    format = WireFormat(bits=4, block=256, symmetric=False, scale="bound")
    x = sample("heavy_tailed", 6 * 35, dtype)
    wires = swizzled(x.reshape(10, 3, 7), format, nodes=3, devices=2)
    for found, (partition, _) in zip(wires.buffer[0], quantize_oracle.swizzled(3, 2, 1)):
        part = x.reshape(6, 35)[partition]
        np.testing.assert_array_equal(found, quantize_oracle.quantize(part, **options(format)))


def test_an_all_to_all_over_device_then_node_brings_everybody_its_partition(mesh24):
    """What the order is for: two all_to_alls without a transposition of wires in between."""
    spec = jax.sharding.PartitionSpec(("node", "device"))
    rows = np.stack([sample("normal", 8 * SIZE, seed=rank) for rank in range(8)])

    @functools.partial(jax.shard_map, mesh=mesh24, in_specs=spec, out_specs=spec)
    def exchange(row):
        wires = swizzled_quantize(row[0], FORMAT, nodes=2, devices=4)
        data = wires.buffer.reshape(4, 2, -1)
        data = jax.lax.all_to_all(data, "device", 0, 0)  # of each device here: [device, node]
        data = jax.lax.all_to_all(data, "node", 1, 0)  # of each node: [node, device]
        return data.reshape(1, 8, -1)

    found = np.asarray(jax.jit(exchange)(rows))
    for rank, sender in np.ndindex(8, 8):
        part = rows[sender].reshape(8, SIZE)[rank]
        expected = quantize_oracle.quantize(part, **options(FORMAT))
        np.testing.assert_array_equal(found[rank, sender], expected)


def test_swizzled_wires_are_restored_at_once():
    x = sample("normal", 8 * SIZE)
    wires = swizzled(x, FORMAT, nodes=2, devices=4)
    values = restored(Wire(jnp.asarray(wires.buffer), SIZE, FORMAT), (SIZE,), "float32")
    assert values.shape == (1, 8, SIZE)
    back = np.empty((8, SIZE), np.float32)
    for place, (partition, _) in enumerate(quantize_oracle.swizzled(2, 4, 1)):
        back[partition] = values[0, place]
    np.testing.assert_allclose(back.ravel(), x, atol=0.02)
