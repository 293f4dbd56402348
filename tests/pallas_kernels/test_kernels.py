"""The kernels in their interpreters against the float64 oracle, bit for bit."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quantize_cases import (
    DISTRIBUTIONS,
    DTYPES,
    FORMATS,
    cover,
    differences,
    format_of,
    name_of,
    product,
    sample,
)
from tools.quick import covering, quick_compilation, thinned  # noqa: F401

from zeroxla.pallas_kernels import shim
from zeroxla.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequant_sum,
    dequantize,
    quantize,
    swizzled_quantize,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

needs_mosaic = pytest.mark.skipif(
    not shim.has_mosaic(), reason="Pallas interprets Mosaic kernels from JAX 0.11 on"
)
needs_triton = pytest.mark.skipif(
    not shim.has_triton(), reason="jax-triton is not installed; the extra triton brings it"
)
KERNELS = [
    pytest.param("mosaic", marks=needs_mosaic),
    pytest.param("triton", marks=needs_triton),
]
# For tests whose Mosaic program is slow to interpret, and says little that others do not.
TRITON_FIRST = [
    pytest.param("mosaic", marks=[needs_mosaic, pytest.mark.slow]),
    pytest.param("triton", marks=needs_triton),
]
FACTORS = {**FORMATS, "block": (16, 100, 256, 2048), "hadamard": (0,)}
ODD_FACTORS = {**FACTORS, "block": (17, 250, 1000, 16384)}
DATA = ("normal", "heavy_tailed", "constant", "zeros", "one_outlier", "denormal", "huge")


def quick(factors):
    """Return a cover without what XLA compiles for 30 s: the interpreted mse of blocks under 32."""
    rows = (row | {"block": 100} if is_slow(row) else row for row in cover(factors))
    return list(dict.fromkeys(format_of(row) for row in rows))


def is_slow(row):
    return row["scale"] == "mse" and row["block"] < 32


# The blocks that Mosaic takes, by the bits of a code, written down here and not asked of the
# kernels. A thread's registers do not hold its share of the others (1000, 16384), and 17 codes of
# 4 bits are not two halves.
MOSAIC_BLOCKS = {8: {16, 17, 100, 256, 2048}, 4: {16, 100, 256, 2048}}


def takes(backend, format):
    """Whether a kernel must take a format of FORMATS: Triton takes each whose groups of 32 rotated
    elements do not lie across the halves of a block. Mosaic loads no every-other element, as
    DeepSpeed's order of 4-bit codes would ask."""
    if backend == "triton":
        return not format.hadamard or format.block // (8 // format.bits) % 32 == 0
    interleaved = format.bits == 4 and format.scale == "deepspeed"
    return format.block in MOSAIC_BLOCKS[format.bits] and not interleaved


def with_kernels(formats):
    """Return (format, kernel) of the kernels that take each format. Quick ones are those with which
    each kernel has every option."""
    backends = ["mosaic"] * shim.has_mosaic() + ["triton"] * shim.has_triton()
    rows = [(format, b) for format in formats for b in backends if takes(b, format)]

    def settings(row):
        format, backend = row
        return [(backend, option) for option in dataclasses.asdict(format).items()]

    return covering(rows, settings, rows=True)


def row_id(value):
    return value if isinstance(value, str) else name_of(value)


def length_of(format: WireFormat) -> int:
    """Return a length of several tiles, the last one ragged, and a short last block."""
    return max(3 * format.block, 70 * 256) + format.block // 2 + 1


@pytest.mark.parametrize(("format", "backend"), with_kernels(quick(FACTORS)), ids=row_id)
def test_kernels_give_the_bits_of_the_oracle(format, backend):
    dtype = DTYPES[format.block % 3]
    assert differences(format, length_of(format), dtype, DATA, backend) == []


def options_of(format):
    return (
        (format.bits, format.scale),
        (format.bits, format.symmetric),
        format.block,
        format.scale_dtype,
    )


@needs_triton
@pytest.mark.parametrize("format", covering(quick(ODD_FACTORS), options_of), ids=name_of)
def test_triton_takes_blocks_of_any_length(format):
    assert differences(format, length_of(format), "float32", DATA, "triton") == []


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    "format",
    thinned(
        [WireFormat(bits=4, hadamard=32, block=128, scale="bound", symmetric=False)],
        slow=[WireFormat(bits=8, hadamard=32, block=64)],
    ),
    ids=name_of,
)
def test_rotated_blocks_give_the_bits_of_the_oracle(format, backend):
    assert differences(format, length_of(format), "bfloat16", DATA, backend) == []


@pytest.mark.parametrize("backend", TRITON_FIRST)
def test_every_source_is_rotated_back_before_it_is_added(backend):
    format, size = WireFormat(bits=8, hadamard=32), 40 * 256 + 5
    wires = [quantize(jnp.asarray(sample("normal", size, seed=i)), format) for i in range(3)]
    stacked = Wire(jnp.stack([w.buffer for w in wires]), size, format)
    found = dequant_sum(stacked, (size,), backend=backend)
    np.testing.assert_array_equal(found, dequant_sum(stacked, (size,), backend="xla"))


@pytest.mark.full
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("row", product(FORMATS), ids=lambda row: name_of(format_of(row)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_gives_the_bits_of_the_oracle(row, dtype, backend):
    format = format_of(row)
    if takes(backend, format):
        assert differences(format, length_of(format), dtype, tuple(DISTRIBUTIONS), backend) == []
    else:
        check_refused(format, dtype, backend)


def check_refused(format, dtype, backend):
    """Check that neither way takes a format, and that the error says which and what to do."""
    size = length_of(format)
    x = jnp.asarray(sample("normal", size, dtype))
    message = (
        rf"^backend='{backend}' does not take 1 wires of {size} elements in blocks of "
        rf"{format.block}, .*use backend=None, which finds one that does$"
    )
    with pytest.raises(ValueError, match=message):
        quantize(x, format, backend=backend)
    with pytest.raises(ValueError, match=message):
        dequantize(quantize(x, format, backend="xla"), x.shape, dtype, backend=backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("bits", thinned([4], slow=[8]))
@pytest.mark.parametrize("scale", thinned(["bound"], slow=["deepspeed"]))
@pytest.mark.parametrize("blocks", thinned([(17, 256)], slow=[(16, 100, 1000, 2048, 16384)]))
def test_each_kernel_takes_what_it_must_and_refuses_the_rest(blocks, scale, bits, backend):
    """Traced and not run: a kernel that refuses everything fails here."""
    formats = [WireFormat(bits=bits, block=block, scale=scale) for block in blocks]
    for format in formats:
        if takes(backend, format):
            x = jax.ShapeDtypeStruct((length_of(format),), jnp.float32)
            wire = jax.eval_shape(partial(quantize, format=format, backend=backend), x)
            values = jax.eval_shape(partial(dequantize, shape=x.shape, backend=backend), wire)
            assert values.shape == x.shape
        else:
            check_refused(format, "float32", backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("format", [WireFormat(bits=8), WireFormat(bits=4)], ids=name_of)
def test_three_million_elements_give_the_bits_of_the_oracle(format, backend):
    assert differences(format, 3 * 10**6 + 1, "float32", ("normal", "one_outlier"), backend) == []


@pytest.mark.parametrize("backend", KERNELS)
def test_stochastic_rounding_and_the_swizzle_are_those_of_the_reference(backend):
    format = WireFormat(bits=4, rounding="stochastic")
    x = jnp.asarray(sample("normal", 12 * 20 * 256))
    arguments = {"nodes": 3, "devices": 2, "chunks": 2, "key": jax.random.key(3)}
    found = swizzled_quantize(x, format, **arguments, backend=backend)
    expected = swizzled_quantize(x, format, **arguments, backend="xla")
    assert found.buffer.shape[:2] == (2, 6)
    np.testing.assert_array_equal(found.buffer, expected.buffer)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("num_sources", thinned([17], slow=[16, 8, 1]))
def test_sums_of_wires_are_those_of_the_reference(num_sources, backend):
    format, size = WireFormat(bits=4, scale="bound"), 20 * 256 + 9
    wires = [quantize(jnp.asarray(sample("normal", size, seed=i)), format) for i in range(17)]
    stacked = Wire(jnp.stack([w.buffer for w in wires[:num_sources]]), size, format)
    found = dequant_reduce(stacked, backend=backend)
    np.testing.assert_array_equal(found.buffer, dequant_reduce(stacked, backend="xla").buffer)


@pytest.mark.parametrize("backend", TRITON_FIRST)
@pytest.mark.parametrize(
    ("source", "out"),
    thinned(
        [(WireFormat(bits=8), WireFormat(bits=4, symmetric=False, scale="bound"))],
        slow=[
            (WireFormat(bits=4), WireFormat(bits=8)),
            (WireFormat(bits=8, block=512), WireFormat(bits=4, block=128, scale="bound")),
            (WireFormat(bits=8, hadamard=32), WireFormat(bits=4, scale="bound", hadamard=32)),
        ],
        rows=True,
    ),
    ids=["8 to 4", "4 to 8", "another block", "both rotated"],
)
def test_a_sum_may_go_to_another_format(source, out, backend):
    size = 20 * 512 + 9
    wires = [quantize(jnp.asarray(sample("normal", size, seed=i)), source) for i in range(3)]
    stacked = Wire(jnp.stack([w.buffer for w in wires]), size, source)
    found = dequant_reduce(stacked, out, backend=backend)
    expected = dequant_reduce(stacked, out, backend="xla")
    np.testing.assert_array_equal(found.buffer, expected.buffer)
    exact = sum(np.float64(dequantize(wire, (size,))) for wire in wires)
    error = np.linalg.norm(dequantize(found, (size,)) - exact) / np.linalg.norm(exact)
    assert error < (0.13 if out.bits == 4 else 0.01)
