"""Wires and their values equal the NumPy oracle bit for bit, over a cover of formats and data.

Quick rows have every value of each factor, slow ones every pair of two.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import (
    BLOCKS,
    DISTRIBUTIONS,
    DTYPES,
    FORMATS,
    LENGTHS,
    allowed,
    cover,
    differences,
    format_of,
    name_of,
    options,
    pairs,
    product,
    quantized,
    restored,
    sample,
)
from tools.quick import covering, thinned

from zeroxla.quantize import Wire, WireFormat, dequantize, quantize

FACTORS = {**FORMATS, "length": LENGTHS, "dtype": DTYPES}
MILLIONS = 3 * 10**6 + 1


def marked(rows, num_smoke):
    """Parameters for rows. The first ones are smoke tests, and together with some others have every
    value of each factor; the rest are slow."""
    smoke, others = rows[:num_smoke], rows[num_smoke:]
    met = set().union(*(row.items() for row in smoke))
    return [
        *(pytest.param(row, marks=pytest.mark.smoke) for row in smoke),
        *covering(others, lambda row: row.items() - met),
    ]


def name_of_row(row):
    return name_of(format_of(row)) + "".join(f"-{row[k]}" for k in ("length", "dtype"))


@pytest.mark.parametrize("row", marked(cover(FACTORS), 4), ids=name_of_row)
def test_wires_and_values_equal_the_oracle(row):
    assert not differences(format_of(row), row["length"], row["dtype"], list(DISTRIBUTIONS))


@pytest.mark.full
@pytest.mark.parametrize("row", product(FORMATS), ids=lambda row: name_of(format_of(row)))
def test_wires_and_values_equal_the_oracle_in_every_format(row):
    """Every length, and the dtypes in turn."""
    dtypes = itertools.cycle(DTYPES)
    for length, dtype in zip(LENGTHS, itertools.islice(dtypes, product(FORMATS).index(row), None)):
        # A block longer than the data is as long as the data: the first such stands for all.
        longer = [b for b in BLOCKS if b >= length and allowed({**row, "block": b})]
        if row["block"] not in longer[1:]:
            found = differences(format_of(row), length, dtype, list(DISTRIBUTIONS))
            assert not found, (length, dtype)


@pytest.mark.full
@pytest.mark.parametrize("row", cover(FORMATS), ids=lambda row: name_of(format_of(row)))
def test_wires_and_values_of_millions_equal_the_oracle(row):
    assert not differences(format_of(row), MILLIONS, "float32", ["heavy_tailed", "far_from_zero"])


def test_the_cover_meets_every_pair():
    everything, some = product(FACTORS), cover(FACTORS)
    assert {p for row in some for p in pairs(row)} == {p for row in everything for p in pairs(row)}
    assert len(some) < len(everything) / 50


@pytest.mark.parametrize(
    ("bits", "hadamard"), thinned([(8, 0), (4, 32)], slow=[(8, 32), (4, 0)], rows=True)
)
def test_a_block_longer_than_the_data_is_as_long_as_the_data(bits, hadamard):
    x = sample("normal", 96)
    formats = [
        WireFormat(bits=bits, block=b, scale="bound", scale_dtype="float32", hadamard=hadamard)
        for b in (96, 128, 2**40)
    ]
    exact, *longer = (quantized(x, format).buffer for format in formats)
    for other in longer:
        np.testing.assert_array_equal(exact, other)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", thinned([(), (3, 5, 7)], slow=[(1,), (1, 1, 1), (105, 1)]))
def test_blocks_run_along_the_flat_array_whatever_its_shape(shape):
    format = WireFormat(bits=4, block=10, scale="bound")
    x = sample("normal", int(np.prod(shape, dtype=int)))
    wire = quantized(x.reshape(shape), format)
    assert wire.size == x.size
    assert wire.format == format
    assert wire.buffer.dtype == np.uint8
    np.testing.assert_array_equal(wire.buffer, quantized(x, format).buffer)
    values = restored(wire, shape, "float32")
    assert values.shape == shape
    expected = quantize_oracle.dequantize(np.asarray(wire.buffer), x.size, **options(format))
    np.testing.assert_array_equal(values.ravel(), expected)
    np.testing.assert_allclose(values, x.reshape(shape), atol=np.abs(x).max() / 7.4)


@pytest.mark.parametrize("dtype", thinned(["bfloat16"], slow=["float32", "float16"]))
def test_several_wires_are_restored_at_once(dtype):
    format = WireFormat(block=32)
    x = np.stack([sample(name, 99, seed=i) for i, name in enumerate(("normal", "one_outlier"))] * 3)
    wires = [quantized(row, format) for row in x]
    buffer = jnp.stack([wire.buffer for wire in wires]).reshape(2, 3, -1)
    got = restored(Wire(buffer, 99, format), (9, 11), dtype)
    assert got.dtype == dtype
    assert got.shape == (2, 3, 9, 11)
    for values, wire in zip(got.reshape(6, 9, 11), wires):
        np.testing.assert_array_equal(values, restored(wire, (9, 11), dtype))


def test_eager_and_compiled_give_the_same_bits():
    format, x = WireFormat(block=100), sample("heavy_tailed", 100, "bfloat16")
    wire = quantize(x, format)
    np.testing.assert_array_equal(wire.buffer, quantized(x, format).buffer)
    values = dequantize(wire, (100,), "bfloat16")
    np.testing.assert_array_equal(values, restored(wire, (100,), "bfloat16"))


@pytest.mark.smoke
def test_the_bytes_of_a_wire():
    """Codes, then a step for each block, then an offset, then zeros up to a multiple of 16."""
    size = 10**6
    for format, expected in (
        (WireFormat(), 10**6 + 3907 * 4),
        (WireFormat(symmetric=False), 10**6 + 3907 * 8),
        (WireFormat(bits=4), 5 * 10**5 + 3907 * 4),
        (WireFormat(bits=4, block=128), 5 * 10**5 + 7813 * 2),
        (WireFormat(block=7), 10**6 + 142858 * 2),
        (WireFormat(bits=4, block=7), 142857 * 4 + 1 + 142858 * 2),
        (WireFormat(bits=4, hadamard=32), 5 * 10**5 + 3907 * 4),
        (WireFormat(bits=4, block=96, hadamard=32), 5 * 10**5 + 10417 * 2),
        (WireFormat(bits=4, block=2**30, hadamard=32), 5 * 10**5 + 4),
    ):
        assert format.num_bytes(size) == -(-expected // 16) * 16, format
    # Of the data: 1.6 % of steps at 8 bits, 3.1 % at 4.
    assert WireFormat().num_bytes(2**20) == 2**20 * (1 + 4 / 256)
    assert WireFormat(bits=4).num_bytes(2**20) == 2**19 * (1 + 8 / 256)
