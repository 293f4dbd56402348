"""Random bits of a block are those that the whole array has there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.quick import thinned

from zeroxla.frontend.rewrite.counted_bits import _times_plus, bits_of_block


@pytest.mark.parametrize("width", thinned([8, 32], slow=[16]))
def test_a_block_has_the_bits_of_the_whole_array(width):
    key, shape = jax.random.key(7), (3, 4, 33, 65)
    whole = jax.random.bits(key, shape, jnp.dtype(f"uint{width}"))
    first = jax.jit(lambda at: bits_of_block(key, width, shape, (0, 1, at, 40), (3, 2, 16, 25)))(
        jnp.int32(17)
    )
    np.testing.assert_array_equal(first, whole[:, 1:3, 17:33, 40:])


def test_places_beyond_32_bits():
    draw = np.random.default_rng(0)
    for _ in range(100):
        word = draw.integers(0, 2**32, 2, dtype=np.uint64)
        n, more = int(draw.integers(1, 2**31)), int(draw.integers(0, 2**31))
        high, low = _times_plus(*(jnp.uint32(x) for x in word), n, jnp.uint32(more))
        exact = ((int(word[0]) << 32 | int(word[1])) * n + more) % 2**64
        assert (int(high) << 32) | int(low) == exact
