"""Quantization of blocks with an inf or a NaN, of blocks of zeros, and of single elements."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import (
    FORMATS,
    cover,
    format_of,
    name_of,
    options,
    quantized,
    restored,
    sample,
)
from tools.quick import covering, quick_compilation, thinned  # noqa: F401

from zeroxla.quantize import WireFormat

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCK, SIZE = 32, 110  # three blocks and a shorter one
# One format of each kind, and one rotation.
ROWS = [*cover({**FORMATS, "block": (BLOCK,), "hadamard": (0,)})]
ROWS.append({**ROWS[0], "hadamard": 32})
IDS = [name_of(format_of(row)) for row in ROWS]


def restored_in_float32(x, format):
    """Return the values of x's wire, and check the wire against the oracle."""
    wire = quantized(x, format)
    np.testing.assert_array_equal(wire.buffer, quantize_oracle.quantize(x, **options(format)))
    return np.array(restored(wire, x.shape, "float32"))


def normal(seed=0):
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


@pytest.mark.parametrize("row", covering(ROWS, dict.items), ids=IDS)
def test_a_block_that_is_not_finite_becomes_nan_and_no_other_changes(row):
    format, clean = format_of(row), normal()
    expected = restored_in_float32(clean, format)
    assert np.isfinite(expected).all()
    for bad in (np.inf, -np.inf, np.nan, -np.nan):
        for at in (0, 37, 63, 96, 109):
            x = clean.copy()
            x[at] = bad
            block = slice(at // BLOCK * BLOCK, at // BLOCK * BLOCK + BLOCK)
            got = restored_in_float32(x, format)
            assert np.isnan(got[block]).all(), (bad, at)
            got[block] = expected[block]
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", thinned(["bfloat16"], slow=["float32", "float16"]))
def test_nan_is_nan_in_every_dtype(dtype):
    x = jnp.asarray(normal()).astype(dtype).at[40].set(np.inf).at[99].set(np.nan)
    wire = quantized(x, WireFormat(block=BLOCK))
    values = restored(wire, (SIZE,), dtype)
    assert values.dtype == dtype
    isnan = np.isnan(np.asarray(values, np.float32))
    np.testing.assert_array_equal(isnan, np.isin(np.arange(SIZE) // BLOCK, [1, 3]))


def test_a_nan_with_any_bits_is_a_nan():
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF):
        for symmetric in (True, False):
            x = normal()
            x[50] = np.uint32(bits).view(np.float32)
            got = restored_in_float32(x, WireFormat(block=BLOCK, symmetric=symmetric))
            assert np.isnan(got[32:64]).all()
            assert np.isfinite(got[:32]).all()
            assert np.isfinite(got[64:]).all()


@pytest.mark.parametrize("row", covering(ROWS, dict.items), ids=IDS)
def test_zeros_and_what_is_below_the_smallest_step_come_back_as_zeros(row):
    format, x = format_of(row), normal()
    for zeros in (0.0, -0.0, 2.0**-96, -(2.0**-140)):
        x[BLOCK : 2 * BLOCK] = zeros
        got = restored_in_float32(x, format)
        assert (got[BLOCK : 2 * BLOCK] == 0).all()
        assert (got[:BLOCK] != 0).any()


@pytest.mark.parametrize(
    ("bits", "scale", "symmetric"),
    covering(
        itertools.product((8, 4), ("bound", "mse", "deepspeed"), (True, False)), iter, rows=True
    ),
)
def test_one_element(bits, scale, symmetric):
    format = WireFormat(bits=bits, scale=scale, symmetric=symmetric, block=256)
    half = 2 ** (bits - 1)
    for value in (0.3, -0.3, 1e30, -1e-20, 65504.0, 0.0):
        (got,) = restored_in_float32(np.float32([value]), format)
        if not symmetric:  # the offset is the value
            assert got == np.float32(value)
        elif scale == "mse":  # so is the lowest code, but for the 16 bits of a step
            np.testing.assert_allclose(got, value, rtol=2.0**-15)
        else:  # the peak lies between two codes, or is clipped
            np.testing.assert_allclose(got, value, rtol=1.01 / half)


@pytest.mark.parametrize("bits", thinned([8], slow=[4]))
def test_a_constant_block_with_an_offset_is_exact(bits):
    for scale in ("bound", "mse", "deepspeed"):
        format = WireFormat(bits=bits, symmetric=False, scale=scale, scale_dtype="float32")
        x = np.full(256, -12345.678, np.float32)
        np.testing.assert_array_equal(restored_in_float32(x, format), x)


@pytest.mark.parametrize("bits", thinned([8], slow=[4]))
@pytest.mark.parametrize("block", thinned([256], slow=[2, 64, 128, 512]))
def test_an_offset_of_few_bits_is_compensated_by_the_step(bits, block):
    """A bfloat16 is 144 off: the step is such that the codes reach as far."""
    x = np.full(block, -7e4, np.float32)
    error = {}
    for scale in ("mse", "deepspeed"):
        format = WireFormat(
            bits=bits, block=block, symmetric=False, scale=scale, scale_dtype="bfloat16"
        )
        error[scale] = np.abs(restored_in_float32(x, format) - x).max()
    assert error["mse"] <= error["deepspeed"] <= 1.01 * 144 / 2 ** (bits - 1)
    if bits == 8:
        assert error["mse"] < 1


def test_an_outlier_costs_a_rotated_block_less():
    x = sample("normal", 256)
    x[5] = 30.0
    error = {}
    for hadamard in (0, 32):
        format = WireFormat(bits=4, scale="bound", hadamard=hadamard)
        error[hadamard] = np.linalg.norm(np.delete(restored_in_float32(x, format) - x, 5))
    # Without the rotation most of the others are lost: half a step is 2.
    assert error[0] > 0.9 * np.linalg.norm(np.delete(x, 5))
    assert error[32] < 0.35 * error[0]
