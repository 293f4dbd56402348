"""Random bits of a block of an array, without the array.

JAX's Threefry generator counts: the bits of an element follow from the key and from the element's
place in the array, if the option `jax_threefry_partitionable` is on, as it is by default. So a
block's bits are those that the whole array has there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from zeroxla.program.trace import Equation

_HALF = 0xFFFF


def can_count(eq: Equation) -> bool:
    """Return whether the bits of a `random_bits` equation can be computed block by block."""
    one_key = eq.inputs[0]
    aval: Any = getattr(one_key, "aval", None)
    if aval is None or aval.shape or str(aval.dtype) != "key<fry>":
        return False
    counts = getattr(eq.source.ctx, "threefry_partitionable", False)
    return bool(counts) and eq.params["bit_width"] in (8, 16, 32) and _agrees()


def bits_of_block(
    key: jax.Array,
    bit_width: int,
    shape: Sequence[int],
    firsts: Sequence[Any],
    block: Sequence[int],
) -> jax.Array:
    """Return the part of `random_bits(key, bit_width, shape)` that a block has.

    Args:
      key: a key of the Threefry generator, a scalar.
      bit_width: 8, 16 or 32.
      shape: the shape of the whole array.
      firsts: the block's first position in each dim; they may be traced.
      block: the block's shape.
    """
    high = low = jnp.zeros(tuple(block), jnp.uint32)
    for d, (n, first) in enumerate(zip(shape, firsts, strict=True)):
        place = lax.broadcasted_iota(jnp.uint32, tuple(block), d)
        place += jnp.asarray(first).astype(jnp.uint32)
        high, low = _times_plus(high, low, n, place)
    one, other = jax.random.key_data(key)
    first_word, second_word = threefry2x32_p.bind(
        jnp.broadcast_to(one, low.shape), jnp.broadcast_to(other, low.shape), high, low
    )
    return (first_word ^ second_word).astype(jnp.dtype(f"uint{bit_width}"))


def _times_plus(
    high: jax.Array, low: jax.Array, n: int, more: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (high, low) n + more, where (high, low) are the two words of a 64-bit number."""
    n_high, n_low = jnp.uint32(n >> 16), jnp.uint32(n & _HALF)
    low_high, low_low = low >> 16, low & _HALF
    # low n in halves of words: each product and each of the sums below fits a word.
    first = low_low * n_low
    second = low_high * n_low + (first >> 16)
    third = low_low * n_high + (second & _HALF)
    product = (third << 16) | (first & _HALF)
    carry = low_high * n_high + (second >> 16) + (third >> 16)
    found = product + more
    return high * jnp.uint32(n) + carry + (found < more).astype(jnp.uint32), found


@functools.cache
def _agrees() -> bool:
    """Return whether a block has the bits that this version of JAX gives the whole array."""

    def both() -> list[tuple[jax.Array, jax.Array]]:
        found, key = [], jax.random.key(3, impl="threefry2x32")
        for width in (8, 16, 32):
            shape = (3, 5, 7)
            whole = jax.random.bits(key, shape, jnp.dtype(f"uint{width}"))
            block = bits_of_block(key, width, shape, (1, 2, 0), (2, 3, 7))
            found.append((whole[1:, 2:], block))
        return found

    with ThreadPoolExecutor(1) as apart:  # this thread may be tracing
        pairs = apart.submit(both).result()
    return all(np.array_equal(a, b) for a, b in pairs)
