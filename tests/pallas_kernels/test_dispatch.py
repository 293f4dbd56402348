"""Dispatch: which kernel runs where and with which tiles; and every kernel compiles for NVIDIA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tools.kernels import variants
from tools.quick import covering

from zeroxla.pallas_kernels import dispatch, mosaic, shim, triton
from zeroxla.pallas_kernels.geometry import MOST_ELEMENTS, THREADS, mosaic_tile, triton_tile
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh
from zeroxla.quantize import WireFormat, quantize

pytestmark = pytest.mark.skipif(
    not shim.has_mosaic(), reason="kernels are compiled without a GPU from JAX 0.11 on"
)
VARIANTS = list(variants("mosaic"))


def lowered(function, *shapes, platform="cuda"):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def kernel_and_format(row):
    """Every kernel, and every format."""
    name, _ = row
    kernel, _, format = name.partition("-int")
    return kernel, format


@pytest.mark.parametrize(
    ("name", "variant"),
    covering(VARIANTS, kernel_and_format, rows=True),
    ids=[v[0] for v in VARIANTS],
)
def test_every_kernel_lowers_for_nvidia(name, variant):
    function, shapes = variant
    assert "mosaic_gpu" in lowered(function, *shapes)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[v[0] for v in VARIANTS])
def test_every_kernel_compiles_for_an_h200(name, variant):
    try:
        mesh = target_mesh(H200, {"node": 2, "device": 4})
    except WheelsMissingError as error:
        pytest.skip(str(error))
    function, shapes = variant
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole) for s in shapes]
    assert "mosaic_gpu" in jax.jit(function).lower(*shapes).compile().as_text()


def test_the_platform_decides_between_kernel_and_reference():
    x = jax.ShapeDtypeStruct((256 * 64,), jnp.float32)
    for_nvidia = lowered(lambda x: quantize(x, WireFormat()), x)
    for_cpu = lowered(lambda x: quantize(x, WireFormat()), x, platform="cpu")
    assert "mosaic_gpu" in for_nvidia
    assert "mosaic_gpu" not in for_cpu


def test_what_no_kernel_takes_ahead_of_time_is_left_to_xla():
    x = jax.ShapeDtypeStruct((5000 * 640,), jnp.float32)
    assert "mosaic_gpu" not in lowered(lambda x: quantize(x, WireFormat(block=5000)), x)
    few = jax.ShapeDtypeStruct((256 * 3,), jnp.float32)
    assert "mosaic_gpu" not in lowered(lambda x: quantize(x, WireFormat()), few)


@pytest.fixture
def chosen(monkeypatch):
    """Returns a function that tells which kernel `quantize` traces: on a GPU of a major compute
    capability, with or without jax-triton, and for blocks of a length. It is None for XLA."""

    def choose(capability, *, installed, block=256):
        calls = []
        for module in (mosaic, triton):
            name = module.__name__.rpartition(".")[2]

            def kernel(x, layout, *_, name=name, **__):
                calls.append(name)
                return jnp.zeros((x.shape[0], layout.num_bytes), jnp.uint8)

            monkeypatch.setattr(module, "quantize", kernel)
        monkeypatch.setattr(dispatch, "_compute_capability", lambda: capability)
        monkeypatch.setattr(shim, "has_triton", lambda: installed)
        x = jax.ShapeDtypeStruct((block * 640,), jnp.float32)
        jax.eval_shape(lambda x: quantize(x, WireFormat(block=block)), x)
        assert len(calls) < 2
        return calls[0] if calls else None

    return choose


def test_gpus_before_hopper_run_triton(chosen):
    assert chosen(8, installed=True) == "triton"
    assert chosen(8, installed=True, block=5000) == "triton"


def test_gpus_before_hopper_run_xla_without_jax_triton_and_say_so_once(chosen):
    dispatch._warn_of_xla.cache_clear()
    with pytest.warns(UserWarning, match=r'by XLA on this GPU, .* "zeroxla\[triton\]"'):
        assert chosen(8, installed=False) is None
    assert chosen(8, installed=False, block=128) is None


def test_hopper_runs_mosaic_and_triton_where_that_does_not_fit(chosen):
    assert chosen(9, installed=True) == "mosaic"
    assert chosen(9, installed=False) == "mosaic"
    assert chosen(9, installed=True, block=5000) == "triton"
    assert chosen(9, installed=False, block=5000) is None


def test_gpus_that_triton_does_not_know_run_xla(chosen):
    assert chosen(7, installed=True) is None  # Volta
    assert chosen(0, installed=True) is None  # not NVIDIA's


def test_triton_is_refused_without_jax_triton(monkeypatch):
    monkeypatch.setattr(shim, "has_triton", lambda: False)
    message = (
        r"backend='triton' needs the packages jax-triton and triton>=3.7, .*"
        r'pip install "zeroxla\[triton\]"'
    )
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones(256 * 64), WireFormat(), backend="triton")


def test_a_backend_that_does_not_fit_is_refused():
    x = jnp.ones(64)
    with pytest.raises(ValueError, match=r"backend='cuda': take one of xla, mosaic, triton"):
        quantize(x, WireFormat(), backend="cuda")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"'mosaic' does not take 1 wires of 64 elements .*geometry"
    ):
        quantize(x, WireFormat(block=16), backend="mosaic")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_mosaic_tile_covers_its_blocks_with_aligned_vectors(bits, item_bytes):
    for block in (32, 64, 96, 100, 128, 256, 512, 1000, 1024, 2048):
        size = block * 500
        layout = WireFormat(bits=bits, block=block).layout(size)
        tile = mosaic_tile(layout, items=size, item_bytes=item_bytes, num_wires=1)
        if tile is None:
            assert block == 1000  # 8 lanes' rows of it are too many registers
            continue
        assert tile.cut.columns * tile.cut.count == block
        assert tile.cut.columns % (tile.lanes * tile.vector) == 0
        assert tile.rows % (4 * 32 // tile.lanes) == 0
        assert tile.vector * item_bytes <= 16
        assert tile.rows * block // THREADS <= MOST_ELEMENTS


def test_vectors_stay_aligned_in_every_wire():
    layout = WireFormat(block=256).layout(256 * 64 + 2)
    tile = mosaic_tile(layout, items=2 * layout.size, item_bytes=4, num_wires=2)
    assert tile is not None
    assert tile.vector == 2


def test_arrays_past_32_bit_counting_are_left_to_xla():
    layout = WireFormat().layout(2**31)
    assert mosaic_tile(layout, items=2**31, item_bytes=4, num_wires=1) is None
    assert triton_tile(layout, items=2**31, item_bytes=4, num_wires=1) is None
