"""The additions by which a GPU rounds and converts, against NumPy. The interpreters of kernels do
without them, so no other test on a CPU runs them."""

import jax
import numpy as np
import pytest

from zeroxla.pallas_kernels.arithmetic import kernel_machine
from zeroxla.pallas_kernels.floats import inverse_of

GPU = kernel_machine(interpret=False)


@pytest.fixture(autouse=True)
def one_operation_at_a_time():
    """A compiler that sees both may leave out an addition and the subtraction after it."""
    with jax.disable_jit():
        yield


def test_the_inverse_of_every_step_is_within_two_to_the_minus_22():
    mantissas = np.arange(2**15, 2**16) / 2**15
    for exponent in (-98, -1, 0, 1, 119):
        step = np.float32(np.ldexp(mantissas, exponent))
        found = np.asarray(inverse_of(jax.numpy.asarray(step)))
        assert np.abs(found.astype(np.float64) * step - 1).max() < 2.0**-22


def numbers():
    """Return ties, numbers beside them, and others, as large as the rounding takes."""
    rng = np.random.default_rng(0)
    ties = np.arange(-300, 300) + 0.5
    large = rng.uniform(-(2.0**22), 2.0**22, 5000)
    x = np.concatenate([ties, rng.uniform(-130, 130, 5000), large, [-(2.0**22), 2.0**22, 0.0]])
    x = np.float32(x)
    return np.concatenate([x, np.nextafter(x, np.float32(0))])[None]


def test_nearest_rounds_to_even():
    x = numbers()
    np.testing.assert_array_equal(GPU.nearest(jax.numpy.asarray(x)), np.rint(x))


def test_the_lowest_8_bits_of_an_integer_are_those_of_the_rounded_number():
    x = numbers()
    found = np.asarray(GPU.integer(jax.numpy.asarray(x)))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found & 255, np.rint(x).astype(np.int32) & 255)


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_become_codes(bits):
    data = np.arange(256, dtype=np.uint8)
    parts = [data] if bits == 8 else [data & 15, data >> 4]
    found = GPU.codes(jax.numpy.asarray(data[None]), bits)
    assert len(found) == len(parts)
    for codes, part in zip(map(np.asarray, found), parts):
        signed = np.where(part < 2 ** (bits - 1), part, part - 2.0**bits)
        assert codes.dtype == np.float32
        np.testing.assert_array_equal(codes[0], signed)
        assert not np.signbit(codes[codes == 0]).any()
