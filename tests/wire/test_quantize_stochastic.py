"""Stochastic rounding: the mean is the value, and a key decides every bit."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools import quantize_oracle
from tools.quantize_cases import DISTRIBUTIONS, name_of, options, sample
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequantize,
    quantize,
    swizzled_quantize,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMATS = [
    WireFormat(rounding="stochastic", **rest)
    for rest in (
        {"block": 32},
        {"bits": 4, "block": 33, "scale_dtype": "float32"},
        {"symmetric": False, "block": 16, "scale_dtype": "float32"},
        {"bits": 4, "symmetric": False, "block": 256},
        {"bits": 4, "block": 256, "hadamard": 32},
    )
]
QUICK = [FORMATS[1], FORMATS[3], FORMATS[4]]
SLOW = [FORMATS[0], FORMATS[2]]
SIZE = 70
KEY = jax.random.key(7)

rounded = jax.jit(quantize, static_argnames=("format",))


def words_of(key):
    """Return the two words that the oracle makes its numbers of."""
    return tuple(np.asarray(jax.random.bits(key, (2,), jnp.uint32)))


@pytest.mark.parametrize("format", thinned(QUICK, slow=SLOW), ids=name_of)
def test_stochastic_wires_equal_the_oracle(format):
    for name in DISTRIBUTIONS:
        if name == "huge" and format.hadamard:
            continue
        x = sample(name, SIZE)
        for key in (KEY, jax.random.key(2**40 + 1)):
            expected = quantize_oracle.quantize(x, **options(format), words=words_of(key))
            np.testing.assert_array_equal(rounded(x, format, key=key).buffer, expected, name)


@pytest.mark.parametrize("format", thinned(QUICK[:1], slow=[*QUICK[1:], *SLOW]), ids=name_of)
def test_the_mean_over_keys_is_the_value_within_5_sigma(format):
    num_keys = 4096
    x = sample("normal", SIZE)
    keys = jax.random.split(KEY, num_keys)
    restore = jax.vmap(lambda key: dequantize(quantize(x, format, key=key), x.shape))
    values = np.asarray(jax.jit(restore)(keys), np.float64)
    sigma = values.std(axis=0) / np.sqrt(num_keys)
    assert (sigma > 0).mean() > 0.8
    # A code with a probability below 16 / num_keys may never have been drawn.
    rare = 16 * np.ptp(values, axis=0).max() / num_keys
    assert (np.abs(values.mean(axis=0) - x) <= 5 * sigma + rare).all()
    if not format.hadamard:
        # One of two values each time.
        assert all(len(np.unique(column)) <= 2 for column in values.T)


@pytest.mark.smoke
def test_a_key_decides_every_bit():
    format, x = FORMATS[0], sample("normal", SIZE)
    first = rounded(x, format, key=KEY).buffer
    np.testing.assert_array_equal(first, rounded(x, format, key=KEY).buffer)
    other = rounded(x, format, key=jax.random.key(8)).buffer
    codes_differ = (np.asarray(first) != np.asarray(other))[:SIZE]
    # Fractions are uniform: a third of all elements differ.
    assert 0.15 < codes_differ.mean() < 0.5
    np.testing.assert_array_equal(first[SIZE:], other[SIZE:])
    # An old-style key is the same key.
    old = rounded(x, format, key=jax.random.PRNGKey(7)).buffer
    np.testing.assert_array_equal(first, old)


def test_what_a_code_stands_for_stays_what_it_is():
    """Multiples of the step have no fraction: no key changes them."""
    x = np.float32([127, -127, 0, 5, -64, 1] * 4) * np.float32(0.25)
    format = WireFormat(rounding="stochastic", scale_dtype="float32", block=24)
    step = 0.25 * (1 + 2.0**-15)  # of 127 codes for the peak, rounded up
    for seed in range(5):
        wire = rounded(x, format, key=jax.random.key(seed))
        parts = quantize_oracle.parts_of(
            np.asarray(wire.buffer), 24, quantize_oracle.Spec(**options(format))
        )
        assert 0.25 <= parts.steps[0] <= step
        np.testing.assert_allclose(dequantize(wire, (24,)), x, atol=step)


def test_positions_and_wires_have_numbers_of_their_own():
    """Equal elements are rounded apart, inside a wire and between the wires of one call."""
    format = FORMATS[0]
    x = np.full((8, SIZE), 0.3, np.float32)
    x[:, ::32] = 1.0
    wires = jax.jit(lambda x: swizzled_quantize(x, format, nodes=2, devices=4, key=KEY))(x)
    codes = np.asarray(wires.buffer)[0, :, :SIZE]
    assert len({row.tobytes() for row in codes}) == 8
    same = (codes[0] == codes[1]).mean()
    assert 0.3 < same < 0.9
    for place, (partition, _) in enumerate(quantize_oracle.swizzled(2, 4, 1)):
        expected = quantize_oracle.quantize(
            x[partition], **options(format), words=words_of(KEY), wire=partition
        )
        np.testing.assert_array_equal(wires.buffer[0, place], expected)


def test_a_reduction_rounds_its_sum_stochastically():
    format = FORMATS[0]
    nearest = dataclasses.replace(format, rounding="nearest")
    data = [
        quantize_oracle.quantize(sample("normal", SIZE, seed=i), **options(nearest))
        for i in range(3)
    ]
    wires = Wire(jnp.asarray(np.stack(data)), SIZE, nearest)
    got = jax.jit(lambda wires: dequant_reduce(wires, format, key=KEY))(wires)
    expected = quantize_oracle.dequant_reduce(
        data, SIZE, options(nearest), options(format), words_of(KEY)
    )
    np.testing.assert_array_equal(got.buffer, expected)


@pytest.mark.parametrize("words", [(12345, -987654321), (0, 0), (7, 7)])
def test_the_numbers_are_uniform_and_know_nothing_of_each_other(words):
    """Between neighbours, between the halves of a block, which share a position, and between the
    blocks."""
    u = quantize_oracle.chances(words, np.arange(2**10) * 256, 256)
    assert u.min() > -0.5
    assert u.max() < 0.5
    assert (u * 2**15 % 2 == 1).all()  # so that no sum with a whole number is a tie
    counts = np.bincount(((u + 0.5) * 64).astype(int).ravel(), minlength=64)
    # 64 bins of 4096: five sigma are 320.
    assert np.abs(counts - 4096).max() < 320
    pairs = {
        "neighbours": (u[:, :-1], u[:, 1:]),
        "halves": (u[:, :128], u[:, 128:]),
        "blocks": (u[:-1], u[1:]),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size), name


def test_two_keys_give_numbers_that_know_nothing_of_each_other():
    starts = np.arange(2**10) * 256
    words = [words_of(jax.random.key(seed)) for seed in range(6)]
    u = [quantize_oracle.chances(each, starts, 256).ravel() for each in words]
    for a, b in itertools.combinations(u, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size)
