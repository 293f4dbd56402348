"""The rotation of neighbours in Triton: the lines of rotation.py once more.

    T        number of blocks, one in each row
    chunk    geometry.NEIGHBOURS elements of a group of rotation.SIZE; a group has 8 of them
    pieces   a tuple of float32[T, C]; piece i has chunk i % 8 of each group, one group after the
             other
    TILE     the geometry.TritonTile of the pieces

A thread holds all chunks of a group, so rotation moves no element from thread to thread. But its
neighbours in memory lie in other threads: floats are joined before they are written, and bytes cut
after they are read, through shared memory. Written in chunks, floats filled half of a sector of 32
bytes at a time, and an H100 reached 30 % of a copy's bandwidth. Reads of floats go through the L1,
which serves the other half, so they stay in chunks, as do the few bytes that are written.
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
def chunks_of(x, TILE: tl.constexpr):
    """Return the 8 chunks of x[T, 8 x C]."""
    x = tl.reshape(x, (TILE.rows, TILE.columns // TILE.neighbours, TILE.chunks, TILE.neighbours))
    x = tl.permute(x, (0, 1, 3, 2))
    a, b = tl.split(tl.reshape(x, (TILE.rows, TILE.columns, 2, 2, 2)))
    a, c = tl.split(a)
    b, d = tl.split(b)
    p, t = tl.split(a)
    q, u = tl.split(b)
    r, v = tl.split(c)
    s, w = tl.split(d)
    return (p, q, r, s, t, u, v, w)


@triton.jit
def joined(pieces, FIRST: tl.constexpr, TILE: tl.constexpr):
    """Undo `chunks_of`: return [T, 8 x C] of the pieces from FIRST on."""
    a = tl.join(
        tl.join(pieces[FIRST], pieces[FIRST + 4]), tl.join(pieces[FIRST + 2], pieces[FIRST + 6])
    )
    b = tl.join(
        tl.join(pieces[FIRST + 1], pieces[FIRST + 5]), tl.join(pieces[FIRST + 3], pieces[FIRST + 7])
    )
    x = tl.join(a, b)
    groups: tl.constexpr = TILE.columns // TILE.neighbours
    x = tl.reshape(x, (TILE.rows, groups, TILE.neighbours, TILE.chunks))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (TILE.rows, TILE.columns * TILE.chunks))


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
