"""The three kernels in Triton, each on one tile: T whole blocks of one wire.

    W         number of wires
    N         number of sources of a reduction
    T         number of blocks, one in each row
    C         number of elements of a block in one piece, and padding up to a power of two
    pieces    a tuple of float32[T, C] that together hold the tile
    insides   a tuple of bool[T, C], False on padding
    tile      a geometry.TritonTile, known when a kernel is compiled, as all in capitals are

If the number of blocks is no multiple of T, the last tile begins early enough to be full. The
blocks that it shares with the tile before are computed twice, with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_arithmetic import chance_of, code_of, decode, encode
from .triton_rotation import chunks_of, joined, rotate, rotate_back
from .triton_scales import grid_of


@triton.jit
def quantize(x_ptr, seed_ptr, out_ptr, WIRE: tl.constexpr, SWIZZLE: tl.constexpr):
    """Quantize a tile of floats [W, size] into uint8[W, num_bytes].

    Args:
      x_ptr: of the floats.
      seed_ptr: of int32[2]; only read with stochastic rounding.
      out_ptr: of the wires.
      WIRE: a triton.Shape.
      SWIZZLE: a swizzle.Swizzle; None keeps the order of wires.
    """
    wire, first = _place(WIRE)
    at = wire * WIRE.size + first * WIRE.block
    pieces = ()
    insides = ()
    COUNT: tl.constexpr = WIRE.pieces
    for i in tl.static_range(COUNT):
        items, inside = _items(WIRE.tile, i, at, WIRE.block)
        if WIRE.padded:
            x = tl.load(x_ptr + items, mask=inside, other=0.0)
        else:
            x = tl.load(x_ptr + items)
        pieces = pieces + (x.to(tl.float32),)
        insides = insides + (inside,)
    if WIRE.rotated:
        pieces = rotate(pieces, WIRE.tile)
    target = wire
    if SWIZZLE is not None:
        partition = wire // SWIZZLE.chunks
        target = (partition % SWIZZLE.devices) * SWIZZLE.nodes + partition // SWIZZLE.devices
        target += wire % SWIZZLE.chunks * (SWIZZLE.nodes * SWIZZLE.devices)
    _write_wire(out_ptr, seed_ptr, target, wire, first, pieces, insides, WIRE)


@triton.jit
def dequant_sum(data_ptr, out_ptr, WIRE: tl.constexpr, SOURCES: tl.constexpr):
    """Sum a tile of uint8[N, W, num_bytes] in float32, and round it to the result's dtype, [W,
    size].

    Args:
      data_ptr: of the wires.
      out_ptr: of the floats.
      WIRE: a triton.Shape.
      SOURCES: N.
    """
    wire, first = _place(WIRE)
    pieces = _read_wires(data_ptr, wire, first, WIRE, SOURCES)
    at = wire * WIRE.size + first * WIRE.block
    COUNT: tl.constexpr = WIRE.tile.cut.count
    for i in tl.static_range(COUNT):
        items, inside = _whole(WIRE.tile, i, at, WIRE.block)
        x = joined(pieces, i * WIRE.tile.chunks, WIRE.tile) if WIRE.rotated else pieces[i]
        x = x.to(out_ptr.dtype.element_ty)
        if WIRE.padded:
            tl.store(out_ptr + items, x, mask=inside)
        else:
            tl.store(out_ptr + items, x)


@triton.jit
def dequant_reduce(
    data_ptr, seed_ptr, out_ptr, WIRE: tl.constexpr, OUT: tl.constexpr, SOURCES: tl.constexpr
):
    """Sum a tile of uint8[N, W, num_bytes] in float32, and quantize it into uint8[W, num_bytes].

    Args:
      data_ptr: of the wires.
      seed_ptr: of int32[2]; only read with stochastic rounding.
      out_ptr: of the wires of the sums.
      WIRE, OUT: the triton.Shape of the wires of either.
      SOURCES: N.
    """
    wire, first = _place(WIRE)
    pieces = _read_wires(data_ptr, wire, first, WIRE, SOURCES)
    insides = ()
    COUNT: tl.constexpr = WIRE.pieces
    for i in tl.static_range(COUNT):
        _, inside = _items(WIRE.tile, i, 0, WIRE.block)
        insides = insides + (inside,)
        if WIRE.padded:
            kept = ()
            for j in tl.static_range(COUNT):
                kept = kept + (tl.where(inside, pieces[j], 0.0) if i == j else pieces[j],)
            pieces = kept
    _write_wire(out_ptr, seed_ptr, wire, wire, first, pieces, insides, OUT)


@triton.jit
def _place(WIRE: tl.constexpr):
    """Return the wire and the first block of the running program."""
    program = tl.program_id(0)
    first = program % WIRE.tiles * WIRE.tile.rows
    if WIRE.full % WIRE.tile.rows != 0:
        first = tl.minimum(first, WIRE.full - WIRE.tile.rows)
    return program // WIRE.tiles, first


@triton.jit
def _items(TILE: tl.constexpr, PIECE: tl.constexpr, at, WIDTH: tl.constexpr):
    """Return where the elements of a piece lie, int32[T, C], and whether each is one, bool[T, C].

    Args:
      TILE: the tile.
      PIECE: the number of the piece.
      at: where the tile's runs of items begin: one run for each block.
      WIDTH: the length of a run.
    """
    columns = tl.arange(0, TILE.columns)[None, :]
    if TILE.chunks > 1:
        group = columns // TILE.neighbours * (TILE.neighbours * TILE.chunks)
        columns = group + PIECE % TILE.chunks * TILE.neighbours + columns % TILE.neighbours
    return _items_of(TILE, PIECE // TILE.chunks, columns, at, WIDTH)


@triton.jit
def _whole(TILE: tl.constexpr, RUN: tl.constexpr, at, WIDTH: tl.constexpr):
    """Return what `_items` does, of all chunks of a piece of the cut: [T, chunks x C]."""
    return _items_of(TILE, RUN, tl.arange(0, TILE.columns * TILE.chunks)[None, :], at, WIDTH)


@triton.jit
def _items_of(TILE: tl.constexpr, RUN: tl.constexpr, columns, at, WIDTH: tl.constexpr):
    """Return what `_items` does, of some columns int32[1, C] of piece RUN of the cut."""
    rows = tl.arange(0, TILE.rows)[:, None]
    places = columns * TILE.cut.count + RUN
    if not TILE.cut.interleaved:
        places = columns + RUN * TILE.cut.columns
    inside = (columns < TILE.cut.columns) & (places < WIDTH) & (rows >= 0)
    return at + (rows * WIDTH + places), inside


@triton.jit
def _load(pointer, TILE: tl.constexpr, at, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the pieces of a tile of bytes. Whole lines are read, and then cut into chunks."""
    found = ()
    COUNT: tl.constexpr = TILE.cut.count
    for i in tl.static_range(COUNT):
        items, inside = _whole(TILE, i, at, WIDTH)
        x = tl.load(pointer + items, mask=inside, other=0) if PADDED else tl.load(pointer + items)
        found = found + (chunks_of(x, TILE) if TILE.chunks > 1 else (x,))
    return found


@triton.jit
def _read_wires(data_ptr, wire, first, WIRE: tl.constexpr, SOURCES: tl.constexpr):
    """Return the pieces of the sum of N wires, which is added up from source 0 on."""
    total = _read_wire(data_ptr, wire, first, WIRE)
    COUNT: tl.constexpr = WIRE.pieces
    for source in tl.static_range(1, SOURCES):
        values = _read_wire(data_ptr, source * WIRE.num_wires + wire, first, WIRE)
        added = ()
        for i in tl.static_range(COUNT):
            added = added + (total[i] + values[i],)
        total = added
    return total


@triton.jit
def _read_wire(data_ptr, wire, first, WIRE: tl.constexpr):
    """Return the pieces of a tile of one wire."""
    base = wire * WIRE.num_bytes
    step = _load_row(data_ptr, base + WIRE.steps_at, first, WIRE)
    offset = step
    if not WIRE.rule.symmetric:
        offset = _load_row(data_ptr, base + WIRE.offsets_at, first, WIRE)
    # Byte run i holds piece i and, with 4 bits, also piece runs + i.
    lower = ()
    upper = ()
    at = base + first * WIRE.width
    data = _load(data_ptr, WIRE.byte_tile, at, WIRE.width, WIRE.bytes_padded)
    RUNS: tl.constexpr = WIRE.runs
    for i in tl.static_range(RUNS):
        code = code_of(data[i], WIRE.rule.bits, False)
        lower = lower + (decode(code, step, offset, WIRE.rule),)
        if WIRE.rule.bits == 4:
            code = code_of(data[i], WIRE.rule.bits, True)
            upper = upper + (decode(code, step, offset, WIRE.rule),)
    pieces = lower + upper
    if WIRE.tile.cut.interleaved and WIRE.rule.bits == 4:
        pieces = upper + lower
    if WIRE.rotated:
        pieces = rotate_back(pieces, WIRE.tile)
    return pieces


@triton.jit
def _write_wire(out_ptr, seed_ptr, target, wire, first, pieces, insides, WIRE: tl.constexpr):
    """Quantize the pieces of a tile into the wire `target`.

    Args:
      out_ptr: of all wires.
      seed_ptr: of int32[2]; only read with stochastic rounding.
      target: the number of the wire to write.
      wire: its number before any swizzle, from which the random numbers follow.
      first: the tile's first block in the wire.
      pieces, insides: of the tile.
      WIRE: the triton.Shape of the wires.
    """
    grid = grid_of(pieces, insides, WIRE)
    step, _, offset, finite = grid
    codes = ()
    COUNT: tl.constexpr = WIRE.pieces
    HALF: tl.constexpr = COUNT // 2
    for i in tl.static_range(COUNT):
        chance = 0.0
        if WIRE.rule.stochastic:
            at = wire * WIRE.size + first * WIRE.block
            items, _ = _items(WIRE.tile, i % HALF, at, WIRE.block)
            chance = chance_of(seed_ptr, items, i >= HALF)
        codes = codes + (encode(pieces[i], grid, WIRE.rule, chance),)
    base = target * WIRE.num_bytes
    RUNS: tl.constexpr = WIRE.runs
    for i in tl.static_range(RUNS):
        byte = codes[i]
        if WIRE.rule.bits == 4:
            if WIRE.tile.cut.interleaved:
                byte = (codes[i + RUNS] & 15) | (codes[i] << 4)
            else:
                byte = (codes[i] & 15) | (codes[i + RUNS] << 4)
        byte = tl.where(finite[:, None], byte, 0).to(tl.uint8)
        items, inside = _items(WIRE.byte_tile, i, base + first * WIRE.width, WIRE.width)
        if WIRE.bytes_padded:
            tl.store(out_ptr + items, byte, mask=inside)
        else:
            tl.store(out_ptr + items, byte)
    _store_row(out_ptr, base + WIRE.steps_at, first, step, WIRE)
    if not WIRE.rule.symmetric:
        _store_row(out_ptr, base + WIRE.offsets_at, first, offset, WIRE)


@triton.jit
def _load_row(data_ptr, at, first, WIRE: tl.constexpr):
    """Return the steps or the offsets of a tile, float32[T]; `at` is where the wire's begin."""
    blocks = first + tl.arange(0, WIRE.tile.rows)
    if WIRE.rule.short:
        row = tl.load((data_ptr + at).to(tl.pointer_type(tl.uint16)) + blocks)
        return (row.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load((data_ptr + at).to(tl.pointer_type(tl.float32)) + blocks)


@triton.jit
def _store_row(out_ptr, at, first, row, WIRE: tl.constexpr):
    """Write the steps or the offsets of a tile, as `_load_row` reads them."""
    blocks = first + tl.arange(0, WIRE.tile.rows)
    if WIRE.rule.short:
        bits = (row.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        tl.store((out_ptr + at).to(tl.pointer_type(tl.uint16)) + blocks, bits)
    else:
        tl.store((out_ptr + at).to(tl.pointer_type(tl.float32)) + blocks, row)
