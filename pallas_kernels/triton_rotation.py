"""The rotation of neighbours in Triton: the lines of rotation.py once more.

    T        number of blocks, one in each row
    chunk    geometry.NEIGHBOURS elements of a group of rotation.SIZE; a group has 8 of them
    pieces   a tuple of float32[T, C]; piece i has chunk i % 8 of each group, one group after the
             other
    TILE     the geometry.TritonTile of the pieces

A thread holds all chunks of a group, so no element moves from thread to thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(pieces, TILE: tl.constexpr):
    """Change signs, and multiply the groups by the Hadamard matrix."""
    return _hadamard(_scaled(pieces, 1.0, TILE), TILE)


@triton.jit
def rotate_back(pieces, TILE: tl.constexpr):
    """Undo `rotate`, up to the rounding of sums."""
    return _scaled(_hadamard(pieces, TILE), 0.03125, TILE)


@triton.jit
def _scaled(pieces, FACTOR: tl.constexpr, TILE: tl.constexpr):
    """Return products with a factor, and with the signs of a group."""
    COUNT: tl.constexpr = TILE.pieces
    scaled = ()
    for i in tl.static_range(COUNT):
        place = tl.arange(0, TILE.columns) % TILE.neighbours + i % TILE.chunks * TILE.neighbours
        first = (place & 1) & (place >> 1 & 1)
        second = (place >> 2 & 1) & (place >> 3 & 1)
        minus = first ^ second ^ (place >> 4 & 1)
        scaled = scaled + (pieces[i] * tl.where(minus != 0, -FACTOR, FACTOR)[None, :],)
    return scaled


@triton.jit
def _hadamard(pieces, TILE: tl.constexpr):
    """Return the sums and differences of elements 16, 8, 4, 2 and 1 apart, in this order."""
    COUNT: tl.constexpr = TILE.pieces
    pieces = _across(_across(_across(pieces, 4, COUNT), 2, COUNT), 1, COUNT)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (_within(_within(pieces[i], 2), 1),)
    return found


@triton.jit
def _across(pieces, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """Add and subtract pieces that are STRIDE chunks apart."""
    found = ()
    for i in tl.static_range(COUNT):
        if i & STRIDE == 0:
            found = found + (pieces[i] + pieces[i + STRIDE],)
        else:
            found = found + (pieces[i - STRIDE] - pieces[i],)
    return found


@triton.jit
def _within(x, STRIDE: tl.constexpr):
    """Add and subtract elements of a chunk that are STRIDE apart."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (ROWS, COLUMNS // (2 * STRIDE), 2, STRIDE))
    a, b = tl.split(tl.permute(x, (0, 1, 3, 2)))
    x = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(x, (ROWS, COLUMNS))
