"""The code of every Mosaic kernel for an H200, run in NumPy, against the float64 oracle: what
interpreters cannot show, such as how registers are packed into words."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tools import ptx
from tools.quantize_cases import name_of, sample

from zeroxla.pallas_kernels import kernels, mosaic, reference, shim
from zeroxla.pallas_kernels.swizzle import Swizzle
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.quantize import WireFormat

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not shim.has_mosaic(), reason="Mosaic takes the kernels from JAX 0.11 on"),
]
quantize = jax.jit(reference.quantize, static_argnums=(1, 3))
DATA = ("normal", "heavy_tailed", "constant", "zeros", "one_outlier", "denormal", "huge")
FORMATS = [
    WireFormat(bits=8),
    WireFormat(bits=4),
    WireFormat(bits=8, block=128),
    WireFormat(bits=4, block=64),
    WireFormat(bits=4, block=2048),
    WireFormat(bits=8, scale="mse", scale_dtype="bfloat16"),
    WireFormat(bits=8, symmetric=False, scale="mse"),
    WireFormat(bits=4, symmetric=False, block=128),
    WireFormat(bits=8, rounding="stochastic"),
    WireFormat(bits=4, rounding="stochastic", scale="bound"),
    WireFormat(bits=8, hadamard=32, block=128),
    WireFormat(bits=4, hadamard=32, block=128),
    WireFormat(bits=8, scale="deepspeed", symmetric=False),
    WireFormat(bits=8, block=34),
    WireFormat(bits=4, scale="bound", block=100),
]


@pytest.fixture(scope="module")
def whole():
    """How arrays lie on an H200 that is not here."""
    try:
        mesh = target_mesh(H200, {"node": 2, "device": 4})
    except WheelsMissingError as error:
        pytest.skip(str(error))
    return NamedSharding(mesh, PartitionSpec())


@pytest.fixture
def code(whole, tmp_path, monkeypatch):
    """Returns the instructions of the one kernel in a function."""
    # A program that comes from the cache dumps nothing, so none is written to it.
    with_cache = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    def compiled(function, *arrays):
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arrays]
        jax.jit(function).lower(*shapes).compile()
        (path,) = Path(tmp_path).glob("*.ptx")
        return ptx.parse(path.read_text())

    yield compiled
    jax.config.update("jax_persistent_cache_min_compile_time_secs", with_cache)


def tile_count(layout, other, sizes):
    tile = mosaic.BACKEND.tile(*dict.fromkeys((layout, other)), **sizes)
    assert tile is not None
    return -(-layout.full // tile.rows)


def outputs(program, arrays, out_bytes, grid):
    """Yield what the code writes, with and without fused roundings."""
    for fuse in (False, True):
        out = np.full(out_bytes, 0xAA, np.uint8)
        flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
        ptx.run(program, [*flat, out], grid, fuse=fuse)
        yield out


def rows_of(dtype, size):
    return np.stack([np.asarray(sample(name, size, dtype, seed=3)) for name in DATA])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_quantize(format, dtype, code):
    size = max(70 * 256, 12 * format.block)
    layout, x = format.layout(size), rows_of(dtype, size)
    seed = np.int32([123456789, -5]) if format.rounding == "stochastic" else None
    swizzle = Swizzle(nodes=7, devices=1, chunks=1) if layout.rule.bits == 4 else None
    arrays = [x] if seed is None else [x, seed]

    def function(x, seed=None):
        return kernels.quantize(mosaic.BACKEND, x, layout, seed, swizzle)

    program = code(function, *arrays)
    words = None if seed is None else tuple(jnp.asarray(seed))
    wanted = np.asarray(quantize(x, layout, words, swizzle))
    tiles = tile_count(layout, layout, kernels.sizes_of_floats(layout, len(x), 1, x.dtype))
    tail = x[:, layout.full * layout.block :]
    rest = reference.quantize_rest(tail, layout, words, swizzle)
    for out in outputs(program, arrays, wanted.size, (tiles, len(x))):
        wires = out.reshape(wanted.shape)
        for at, patch in rest:
            wires[:, at : at + patch.shape[1]] = patch
        np.testing.assert_array_equal(wires, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS, ids=name_of)
def test_dequantize(format, dtype, code):
    if format.rounding == "stochastic":
        pytest.skip("rounding does not change how a wire is read")
    size = max(70 * 256, 12 * format.block)
    layout = format.layout(size)
    wires = np.asarray(quantize(rows_of("float32", size), layout))
    data = wires[None]
    program = code(lambda w: kernels.dequant_sum(mosaic.BACKEND, w, layout, dtype), data)
    wanted = np.asarray(reference.dequant_sum(data, layout, jnp.dtype(dtype)))
    tiles = tile_count(layout, layout, kernels.sizes_of_floats(layout, len(wires), 1, dtype))
    split = layout.full * layout.block
    for out in outputs(program, [data], wanted.nbytes, (tiles, len(wires))):
        values = out.view(wanted.dtype).reshape(wanted.shape)[:, :split].astype(np.float32)
        np.testing.assert_array_equal(values, wanted[:, :split].astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hadamard", [0, 32])
@pytest.mark.parametrize("bits", [8, 4])
def test_floats_fill_whole_sectors(bits, hadamard, dtype, code):
    # Half-filled ones took an H100 up to four times as long.
    layout = WireFormat(bits=bits, block=256, hadamard=hadamard).layout(128 * 256)
    x = np.random.default_rng(0).normal(size=(1, 128 * 256)).astype(np.float32)
    data = np.asarray(quantize(x, layout))[None]
    program = code(lambda w: kernels.dequant_sum(mosaic.BACKEND, w, layout, dtype), data)
    tiles = tile_count(layout, layout, kernels.sizes_of_floats(layout, 1, 1, dtype))
    out = np.zeros(x.size * jnp.dtype(dtype).itemsize, np.uint8)
    memory = [data.reshape(-1), out]
    assert ptx.run(program, memory, (tiles, 1), fuse=False) == 0


PAIRS = [
    (WireFormat(bits=8), WireFormat(bits=8)),
    (WireFormat(bits=4), WireFormat(bits=4)),
    (WireFormat(bits=8, block=128, hadamard=32), WireFormat(bits=4, block=128, hadamard=32)),
    (WireFormat(bits=4, symmetric=False), WireFormat(bits=8, rounding="stochastic")),
]


@pytest.mark.parametrize("num_sources", [4, 8])
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=name_of)
def test_dequant_reduce(source, target, num_sources, code):
    size = 70 * 256
    layout, out_layout = source.layout(size), target.layout(size)
    x = np.stack([rows_of("float32", size) for _ in range(num_sources)])
    x += np.random.default_rng(0).normal(0, 0.1, x.shape).astype(np.float32)
    data = np.stack([quantize(row, layout) for row in x])
    if source.hadamard:
        layout, out_layout = layout.as_rotated_data(), out_layout.as_rotated_data()
    seed = np.int32([77, 99]) if target.rounding == "stochastic" else None
    arrays = [data] if seed is None else [data, seed]

    def function(data, seed=None):
        return kernels.dequant_reduce(mosaic.BACKEND, data, layout, out_layout, seed)

    program = code(function, *arrays)
    words = None if seed is None else tuple(jnp.asarray(seed))
    wanted = np.asarray(reference.dequant_reduce(data, layout, out_layout, words))
    sizes = kernels.sizes_of_wires(layout, out_layout, data.shape[1], num_sources)
    tiles = tile_count(layout, out_layout, sizes)
    unwritten = list(itertools.chain(*(range(at, at + n) for at, n in out_layout.zeros)))
    for out in outputs(program, arrays, wanted.size, (tiles, data.shape[1])):
        wires = out.reshape(wanted.shape)
        wires[:, unwritten] = 0
        np.testing.assert_array_equal(wires, wanted)
