"""The sum of wires as a wire, against the oracle: every count of sources, format and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import name_of, options, sample
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.quantize import Wire, WireFormat, dequant_reduce

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZE = 523
INT8 = WireFormat()
INT4 = WireFormat(bits=4)
BOUND4 = WireFormat(bits=4, scale="bound", scale_dtype="bfloat16")
# (sources, result): alike, and with another width, rule, offset, or block.
PAIRS = thinned(
    [
        (INT8, INT8),
        (
            WireFormat(bits=4, symmetric=False, scale="deepspeed"),
            WireFormat(scale_dtype="bfloat16"),
        ),
        (WireFormat(block=512), WireFormat(bits=4, symmetric=False, block=100, scale="bound")),
    ],
    slow=[
        (INT4, INT4),
        (INT8, BOUND4),
        (WireFormat(symmetric=False), WireFormat(bits=4, scale="deepspeed")),
    ],
    rows=True,
)

reduced = jax.jit(dequant_reduce, static_argnames=("format",))


def wires_of(names, format, size=SIZE):
    """Return (a wire of several sources, their bytes), quantized by the oracle."""
    data = [
        quantize_oracle.quantize(sample(name, size, seed=i), **options(format))
        for i, name in enumerate(names)
    ]
    return Wire(jnp.asarray(np.stack(data)), size, format), data


def check(names, source, result, size=SIZE):
    wires, data = wires_of(names, source, size)
    found = reduced(wires, result)
    assert (found.size, found.format) == (size, result)
    expected = quantize_oracle.dequant_reduce(data, size, options(source), options(result))
    np.testing.assert_array_equal(found.buffer, expected)


@pytest.mark.parametrize("num_sources", thinned([1, 3], slow=[2, 8, 16]))
def test_the_sum_of_any_number_of_sources_equals_the_oracle(num_sources):
    names = ["normal", "heavy_tailed", "one_outlier", "zeros"] * 4
    check(names[:num_sources], BOUND4, INT8)


@pytest.mark.parametrize(("source", "result"), PAIRS, ids=name_of)
def test_every_pair_of_formats_equals_the_oracle(source, result):
    for names in (
        ["normal", "heavy_tailed", "normal"],
        ["constant", "constant_negative", "far_from_zero"],
        ["large", "tiny", "denormal"],
        ["zeros", "zeros", "zeros"],
    ):
        check(names, source, result)


def test_rotated_sources_equal_the_oracle():
    format = WireFormat(bits=4, block=64, hadamard=32, scale="bound")
    check(["normal", "one_outlier"], format, format, size=128)


@pytest.mark.smoke
def test_the_first_source_comes_first_and_sums_are_float32():
    """1 + 2^-24 + 2^-24 is 1 from the left and 1 + 2^-23 from the right."""
    format = WireFormat(scale="deepspeed", block=4, scale_dtype="float32", symmetric=False)
    big, small = np.ones(SIZE, np.float32), np.full(SIZE, 2.0**-24, np.float32)
    for order, expected in (((big, small, small), 1.0), ((small, small, big), 1 + 2.0**-23)):
        data = [quantize_oracle.quantize(x, **options(format)) for x in order]
        found = reduced(Wire(jnp.asarray(np.stack(data)), SIZE, format), None)
        values = quantize_oracle.dequantize(np.asarray(found.buffer), SIZE, **options(format))
        np.testing.assert_array_equal(values, np.full(SIZE, expected, np.float32))


def test_one_source_in_the_same_format_keeps_its_values():
    """Where the peak is a code already: the symmetric rule of DeepSpeed with its lowest code."""
    format = WireFormat(scale="deepspeed", block=64)
    x = np.float32(np.random.default_rng(0).integers(-128, 128, SIZE)) * np.float32(2.0**-10)
    x[::64] = -(2.0**-3)
    wire = quantize_oracle.quantize(x, **options(format))
    found = reduced(Wire(jnp.asarray(wire[None]), SIZE, format), None)
    np.testing.assert_array_equal(found.buffer, wire)
    np.testing.assert_array_equal(quantize_oracle.dequantize(wire, SIZE, **options(format)), x)


def test_further_dims_are_so_many_sums():
    names = ["normal", "heavy_tailed", "one_outlier"]
    wires, data = wires_of(names * 4, INT8)
    buffer = wires.buffer.reshape(3, 2, 2, -1)
    found = reduced(Wire(buffer, SIZE, INT8), BOUND4)
    assert found.buffer.shape == (2, 2, BOUND4.num_bytes(SIZE))
    for i, got in enumerate(np.asarray(found.buffer).reshape(4, -1)):
        expected = quantize_oracle.dequant_reduce(data[i::4], SIZE, options(INT8), options(BOUND4))
        np.testing.assert_array_equal(got, expected)


def test_a_nan_of_one_source_is_in_the_sum():
    x = sample("normal", SIZE)
    x[300] = np.inf
    data = [quantize_oracle.quantize(row, **options(INT8)) for row in (sample("normal", SIZE), x)]
    found = reduced(Wire(jnp.asarray(np.stack(data)), SIZE, INT8), BOUND4)
    values = quantize_oracle.dequantize(np.asarray(found.buffer), SIZE, **options(BOUND4))
    np.testing.assert_array_equal(np.isnan(values), np.arange(SIZE) // 256 == 1)


@pytest.mark.slow
def test_the_mean_of_two_by_two_ranks():
    """Rank r holds -(r + 1) everywhere: summed on nodes, then between them, the mean is -2.5."""
    data = [
        quantize_oracle.quantize(np.full(SIZE, -(rank + 1.0), np.float32), **options(INT4))
        for rank in range(4)
    ]
    ranks = Wire(jnp.asarray(np.stack(data)).reshape(2, 2, -1), SIZE, INT4)  # [device, node]
    found = reduced(reduced(ranks, None), None)
    values = quantize_oracle.dequantize(np.asarray(found.buffer), SIZE, **options(INT4)) / 4
    np.testing.assert_array_equal(values, np.full(SIZE, -2.5, np.float32))
