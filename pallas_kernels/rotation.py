"""The Hadamard rotation of a block's elements, SIZE at a time, after a fixed change of signs.

A block is cut into SIZE runs, and a group is one element of each run. Runs are often alike, as rows
of a matrix are, and would add up to one large run and many small ones. So a fixed pattern changes
the signs of some elements first.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .floats import SIGN, bits_of, float_of

SIZE = 32
# H H = 32, so THERE x BACK x H H is the identity. Both are powers of two: products are exact.
THERE, BACK = 1 / 4, 1 / 8
# Bit c % 32 of word i is set if element c of run i changes its sign: 1024 tosses of a coin.
SIGNS = np.random.RandomState(0).randint(0, 2**32, SIZE, dtype=np.uint32).view(np.int32)


def rotate(pieces: Sequence[jax.Array], columns: jax.Array) -> list[jax.Array]:
    """Change the signs of the elements, and multiply them by H / 4.

    Args:
      pieces: the SIZE runs of each block, float32[T, C] each.
      columns: the place of each element in its run, int32[T, C].

    Returns:
      The SIZE rotated runs.

    Cost: 5 additions and 3 integer operations for each element.
    """
    return _hadamard(_signed(pieces, columns), THERE)


def rotate_back(pieces: Sequence[jax.Array], columns: jax.Array) -> list[jax.Array]:
    """Undo `rotate`, up to the rounding of sums."""
    return _signed(_hadamard(pieces, BACK), columns)


def _signed(pieces: Sequence[jax.Array], columns: jax.Array) -> list[jax.Array]:
    """Change the signs of the elements whose bit in SIGNS is set."""
    to_the_top = 31 - (columns & 31)
    return [
        float_of(bits_of(piece) ^ (lax.shift_left(jnp.full_like(columns, word), to_the_top) & SIGN))
        for piece, word in zip(pieces, SIGNS)
    ]


def _hadamard(pieces: Sequence[jax.Array], factor: float) -> list[jax.Array]:
    """Multiply the elements by `factor` times H, across pieces."""
    pieces = list(pieces)
    stride = len(pieces) // 2
    while stride:
        for i in range(len(pieces)):
            if not i & stride:
                a, b = pieces[i], pieces[i + stride]
                pieces[i], pieces[i + stride] = a + b, a - b
        stride //= 2
    return [piece * np.float32(factor) for piece in pieces]


def rotate_blocks(x: jax.Array) -> jax.Array:
    """Rotate whole blocks, float32[T, length], to the same bits as `rotate`.

    It takes two loops over arrays instead of 160 sums of runs, which XLA needs five times as long
    to compile.
    """
    return _hadamard_of_blocks(_signed_blocks(x), THERE)


def rotate_blocks_back(x: jax.Array) -> jax.Array:
    """Rotate whole blocks, float32[T, length], back."""
    return _signed_blocks(_hadamard_of_blocks(x, BACK))


def _signed_blocks(x: jax.Array) -> jax.Array:
    columns = np.arange(x.shape[1] // SIZE, dtype=np.uint32) % 32
    flips = (SIGNS.view(np.uint32)[:, None] >> columns << 31).view(np.int32)
    return float_of(bits_of(x) ^ flips.reshape(-1))


def _hadamard_of_blocks(x: jax.Array, factor: float) -> jax.Array:
    # The most significant bits of a run's number come first, as in `_hadamard`: three stages in one
    # loop of XLA's, then two. Each element is summed by itself, in the order of the stages, and not
    # together with its group. That is more sums in fewer passes over memory, and 4 times as fast.
    shape = x.shape
    x = _stages(x.reshape(shape[0], 1, 8, -1))
    x = _stages(x.reshape(shape[0], 8, 4, -1))
    return x.reshape(shape) * np.float32(factor)


def _stages(x: jax.Array) -> jax.Array:
    """Return the Hadamard transform of [T, G, N, C] along N, which is a power of two."""
    size = x.shape[2]
    parts = [x[:, :, i : i + 1] for i in range(size)]
    stride = size // 2
    while stride:
        minus = np.arange(size) & stride != 0
        signs = np.where(minus, np.float32(-1), np.float32(1))[:, None]
        parts = [a + b * signs for a, b in zip(parts[:stride], parts[stride:], strict=True)]
        stride //= 2
    return lax.optimization_barrier(parts[0])
