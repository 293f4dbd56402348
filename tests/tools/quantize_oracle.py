"""The wire formats in NumPy, written from the formulas. Every backend must give these bits.

Numbers are float64, and `single` rounds one to float32 where the specification does. A sum, product
or quotient of two float32 has at most 48 significant bits or is rounded innocuously in float64
(53 >= 2 x 24 + 2), so that one rounding more gives what a float32 machine gives. Sums over a block
are whole numbers, in int64.

    N   blocks of one length, one a row
    L   their elements

Imports neither JAX nor the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

TINY = 2.0**-90  # a block of smaller magnitudes is zero
LEAST_STEP = 2.0**-98
ALIGNMENT, ROW_ALIGNMENT = 16, 4
# The formulas round, overflow and divide by zero on purpose.
silent = np.errstate(over="ignore", invalid="ignore", divide="ignore")

LONGEST = 2**19  # a longer block of 4-bit "mse" clips nothing
# The signs that elements change before a rotation, 32 neighbours at a time.
SIGNS = np.array([1.0 if c == "+" else -1.0 for c in "+++-+++-+++----+---+---+---++++-"])


class Spec(NamedTuple):
    """A format. `short` means scale_dtype="bfloat16"."""

    bits: int
    block: int
    symmetric: bool
    scale: str
    short: bool
    rotated: bool

    @property
    def half(self) -> int:
        return 2 ** (self.bits - 1)

    def stored(self, x_N: np.ndarray) -> np.ndarray:
        """Return float32 numbers rounded as the wire stores them."""
        if not self.short:
            return x_N
        return x_N.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


class Grid(NamedTuple):
    """The grid of each block, as float64[N]: value = code x step + offset. `inverse` is 1 / step,
    rounded to float32."""

    step: np.ndarray
    inverse: np.ndarray
    offset: np.ndarray

    def where(self, condition: np.ndarray, other: Grid) -> Grid:
        return Grid(*(np.where(condition, a, b) for a, b in zip(self, other)))


def single(x) -> np.ndarray:
    """Return float64 numbers rounded to float32, as float64."""
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def upper(x: float) -> np.ndarray:
    """Return a float32 factor slightly above x, so that rounding leaves a product with it at least
    as large as with x."""
    return single(x * (1 + 2.0**-22))


def significant(x_N: np.ndarray, bits: int, to) -> np.ndarray:
    """Return numbers rounded by `to` (np.ceil, np.trunc) to so many significant bits."""
    mantissa, exponent = np.frexp(x_N)
    return np.ldexp(to(np.ldexp(mantissa, bits)), exponent - bits)


def inverse_of(step: np.ndarray) -> np.ndarray:
    """Return 1 / step by three steps of Newton's method. Every operation is rounded to float32."""
    guess = np.int32(0x7EF311C3) - step.astype(np.float32).view(np.int32)
    y = guess.view(np.float32).astype(np.float64)
    for _ in range(3):
        y = single(y * single(2 - single(step * y)))
    assert (np.abs(y * step - 1) < 2.0**-22).all()
    return y


def blocks_of(x: np.ndarray, spec: Spec) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first element, [N, L]): the blocks of full length, then the short last one."""
    full = x.size // spec.block * spec.block
    if full:
        yield 0, x[:full].reshape(-1, spec.block)
    if full < x.size:
        yield full, x[None, full:]


def changed_signs(x_NL: np.ndarray) -> np.ndarray:
    """Return blocks with the signs of SIGNS."""
    return x_NL * np.tile(SIGNS, x_NL.shape[1] // 32)


def hadamard(x_NL: np.ndarray, factor: float) -> np.ndarray:
    """Return factor x H x, where x is 32 neighbours of a block.

    H is the 32-fold Kronecker power of [[1, 1], [1, -1]], applied one power after the other, the
    most significant bit of the place first: each of 5 sums is rounded to float32.
    """
    x = x_NL
    for bit in (4, 3, 2, 1, 0):
        x = x.reshape(-1, 2, 2**bit)
        x = single(np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1))
    return single(x.reshape(x_NL.shape) * factor)


def padded(x_NL: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(x_NL, ((0, 0), (0, -x_NL.shape[1] % multiple)))


@silent
def quantize(
    x: np.ndarray, *, words: tuple[int, int] | None = None, wire: int = 0, **options: Any
) -> np.ndarray:
    """Return the uint8 wire of a 1-D array of any floating dtype.

    Args:
      x: the array.
      words: the two words from which the numbers of stochastic rounding come.
      wire: the number of the wire among those of one call, for stochastic rounding.
      **options: the format, the fields of `Spec`.
    """
    spec = Spec(**options)
    payload, rows = [], []
    for first, x_NL in blocks_of(x.astype(np.float64), spec):
        starts = wire * x.size + first + np.arange(len(x_NL)) * x_NL.shape[1]
        if spec.rotated:
            x_NL = hadamard(changed_signs(padded(x_NL, 32)), 1)
        chance_NL = None if words is None else chances(words, starts, x_NL.shape[1])
        finite = (np.abs(x_NL) < 2.0**126).all(axis=1)
        x_NL = np.where(finite[:, None], x_NL, 0.0)
        grid = grid_of(x_NL, spec, words is not None)
        if spec.bits == 4:  # a nibble without an element holds the code of zero
            x_NL = padded(x_NL, 2)
            chance_NL = None if chance_NL is None else padded(chance_NL, 2)
        codes = np.where(finite[:, None], codes_of(x_NL, grid, spec, chance_NL), 0)
        payload.append(pack(codes.astype(np.int64), spec))
        kept = (grid.step,) if spec.symmetric else (grid.step, grid.offset)
        rows.append([np.where(finite, row, np.nan) for row in kept])
    codes_B = np.concatenate(payload, axis=None)
    codes_B = np.pad(codes_B, (0, -codes_B.size % ROW_ALIGNMENT))
    numbers = [row_bytes(np.concatenate(row), spec.short) for row in zip(*rows)]
    wire_data = np.concatenate([codes_B, *numbers])
    return np.pad(wire_data, (0, -wire_data.size % ALIGNMENT))


def grid_of(x_NL: np.ndarray, spec: Spec, stochastic: bool) -> Grid:
    """Return the grid of finite blocks."""
    return (symmetric_grid if spec.symmetric else offset_grid)(x_NL, spec, stochastic)


def symmetric_grid(x_NL: np.ndarray, spec: Spec, stochastic: bool) -> Grid:
    peak = np.abs(x_NL).max(axis=1)
    zero = peak < TINY
    peak = np.where(zero, 1.0, peak)
    none = np.zeros_like(peak)
    unity = Grid(np.ones_like(peak), np.ones_like(peak), none)
    if spec.scale == "bound":
        codes = spec.half - 1 if stochastic else spec.half - 0.5
        step = significant(single(peak * upper(1 / codes)), 8 if spec.short else 16, np.ceil)
        return unity.where(zero, Grid(single(step), inverse_of(step), none))
    if spec.scale == "deepspeed":
        return unity.where(zero, deepspeed_grid(peak, none, spec))
    # The peak gets the lowest code.
    sign = np.where(x_NL.max(axis=1) < peak, 1.0, -1.0)
    step = shrunk(x_NL, peak / spec.half, spec)
    return unity.where(zero, Grid(step * sign, inverse_of(step) * sign, none))


def offset_grid(x_NL: np.ndarray, spec: Spec, stochastic: bool) -> Grid:
    top, bottom = x_NL.max(axis=1), x_NL.min(axis=1)
    zero = np.maximum(np.abs(top), np.abs(bottom)) < TINY
    top, bottom = (np.where(zero | (np.abs(x) < 2.0**-120), 0.0, x) for x in (top, bottom))
    centre, radius = single(top / 2 + bottom / 2), single(top / 2 - bottom / 2)
    unity = np.ones_like(radius)

    def grid(down: float, up: float, kept) -> Grid:
        # One more code is negative: half a step over the centre, they lie evenly.
        step = significant(single(radius * single(2 / (down + up))), 16, np.trunc)
        offset = spec.stored(single(centre + step / 2))
        below = single(single(offset - bottom) * upper(1 / down))
        above = single(single(top - offset) * upper(1 / up))
        step = np.maximum(below, above)
        constant = step == 0
        step = kept(np.maximum(step, LEAST_STEP), offset)
        return Grid(unity, unity, offset).where(constant, Grid(step, inverse_of(step), offset))

    if spec.scale == "bound":
        reach = 0.0 if stochastic else 0.5
        bits = 8 if spec.short else 16
        up = lambda step, _: significant(step, bits, np.ceil)  # noqa: E731
        return grid(spec.half + reach, spec.half - 1 + reach, up)
    if spec.scale == "mse":
        shorter = lambda step, offset: shrunk(single(x_NL - offset[:, None]), step, spec)  # noqa: E731
        return grid(spec.half + 0.5, spec.half - 0.5, shorter)
    middle = spec.stored(centre)
    wider = np.maximum(single(top - middle), single(middle - bottom)) if spec.short else radius
    constant = wider == 0
    base = deepspeed_grid(np.where(constant, 1.0, np.maximum(wider, TINY)), middle, spec)
    return Grid(unity, unity, base.offset).where(constant, base)


def deepspeed_grid(peak: np.ndarray, offset: np.ndarray, spec: Spec) -> Grid:
    """Return DeepSpeed's grid: a code is x times inverse, a value is a code times 1 / inverse, each
    rounded."""
    inverse = single(spec.half / peak)
    step = spec.stored(single(1 / inverse))
    return Grid(step, single(1 / step) if spec.short else inverse, offset)


def shrunk(x_NL: np.ndarray, step: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the step of "mse": the one that clips nothing or, with 4 bits, a x 8 step + b x the
    mean magnitude if that pays. With 8 bits, or 16, of mantissa, as it is stored.

    Magnitudes are rounded to the finest multiple of a power of two for which their sum is surely
    below 2^24. Steps and mean are cut off to 16 bits of mantissa, and factors rounded to 8.

    It pays if (sum beyond 8 short) x (8 long - 8 short) x 16 x short is less than
    min(length x short, sum) x (long^2 - short^2), each product rounded.
    """
    length = x_NL.shape[1]
    of_peak = max(0.02, 0.166 - 0.0092 * np.log2(length))
    of_mean = max(0.0, 0.02 * (np.log2(length) - 4))
    if spec.bits == 4 and of_peak < 1 / 8 and length <= LONGEST:
        room = min(22, 24 - (length - 1).bit_length())  # bits that one magnitude may take
        unit = 2.0 ** (np.frexp(step)[1] - 1 + 5 - room)  # 16 steps are below 2^5 such powers
        long, x_NL = step / unit, np.rint(np.abs(x_NL) / unit[:, None])
        total = x_NL.sum(axis=1)
        brief = lambda x: significant(np.float64(x), 8, np.rint)  # noqa: E731
        cut = lambda x_N: significant(x_N, 16, np.trunc)  # noqa: E731
        short = single(cut(long) * brief(8 * of_peak) + cut(total) * brief(of_mean / length))
        short = np.minimum(short, long)
        end, top = np.rint(8 * short), np.rint(8 * long)
        beyond = np.maximum(x_NL - end[:, None], 0).sum(axis=1)
        lost = single(single((top - end) * beyond) * single(16 * short))
        gain = single(single(long - short) * single(long + short))
        gained = single(np.minimum(single(length * short), total) * gain)
        step = np.where(lost < gained, short, long) * unit
    return spec.stored(step) if spec.short else significant(step, 16, np.trunc)


def codes_of(
    x_NL: np.ndarray, grid: Grid, spec: Spec, chance_NL: np.ndarray | None = None
) -> np.ndarray:
    """Return the codes of finite blocks, as float64."""
    step, inverse, offset = (row[:, None] for row in grid)
    centred = single(x_NL - offset)
    code = single(centred * inverse)
    if chance_NL is not None:
        code = single(np.clip(code, -spec.half, spec.half - 1) + chance_NL)
    code = np.clip(np.rint(code), -spec.half, spec.half - 1)
    return np.where(np.isfinite(step), code, 0.0)


def values_of(code_NL: np.ndarray, step: np.ndarray, offset: np.ndarray, spec: Spec) -> np.ndarray:
    """Return code x step, rounded to float32, plus offset, rounded again. Only with "deepspeed" is
    the product not exact.

    There a zero has the sign of the sum of two products: of code and the upper 16 bits of step, and
    of code and the other bits.
    """
    upper_bits = significant(step, 16, np.trunc)
    value = code_NL * upper_bits[:, None]
    if spec.scale == "deepspeed":
        value = single(value + code_NL * (step - upper_bits)[:, None])
    return value if spec.symmetric else single(value + offset[:, None])


def pack(codes_NL: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the payload of blocks: uint8[N, bytes]."""
    if spec.bits == 8:
        return codes_NL.astype(np.int8).view(np.uint8)
    if spec.scale == "deepspeed":
        high, low = codes_NL[:, ::2], codes_NL[:, 1::2]
    else:
        low, high = np.split(codes_NL, 2, axis=1)
    return (low % 16 + high % 16 * 16).astype(np.uint8)


def unpack(data_NB: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the codes in a payload that `pack` made, as float64."""
    if spec.bits == 8:
        return data_NB.view(np.int8).astype(np.float64)
    low, high = data_NB % 16, data_NB // 16
    if spec.scale == "deepspeed":
        nibbles = np.stack([high, low], axis=2).reshape(len(data_NB), -1)
    else:
        nibbles = np.concatenate([low, high], axis=1)
    return np.where(nibbles < 8, nibbles, nibbles - 16.0)


def row_bytes(row_N: np.ndarray, short: bool) -> np.ndarray:
    """Return the bytes of steps or offsets, 2 or 4 of each, least significant first."""
    row = row_N.astype(ml_dtypes.bfloat16 if short else np.float32)
    assert np.array_equal(row.astype(np.float64), row_N, equal_nan=True)
    return row.view(np.uint8)


class Parts(NamedTuple):
    """The parts of a wire: payloads of the full blocks and of the tail, steps, and offsets (or
    zeros)."""

    payload: list[np.ndarray]
    steps: np.ndarray
    offsets: np.ndarray


def parts_of(wire: np.ndarray, size: int, spec: Spec) -> Parts:
    """Return the parts of the wire of so many elements."""
    payload, at, num_blocks = [], 0, 0
    for _, block in blocks_of(np.zeros(size), spec):
        codes = padded(block, 32) if spec.rotated else block
        width = -(-codes.shape[1] * spec.bits // 8)
        payload.append(wire[at : at + len(block) * width].reshape(len(block), width))
        at, num_blocks = at + payload[-1].size, num_blocks + len(block)
    dtype = ml_dtypes.bfloat16 if spec.short else np.float32
    rows = []
    at += -at % ROW_ALIGNMENT
    for _ in range(1 if spec.symmetric else 2):
        data = wire[at : at + num_blocks * dtype(0).itemsize]
        rows.append(data.copy().view(dtype).astype(np.float64))
        at += data.size
    assert wire.size == at + -at % ALIGNMENT
    assert not wire[at:].any()
    return Parts(payload, rows[0], rows[1] if len(rows) > 1 else np.zeros(num_blocks))


@silent
def dequantize(wire: np.ndarray, size: int, **options: Any) -> np.ndarray:
    """Return the values of a wire, float32[size]. The options are the fields of `Spec`."""
    spec = Spec(**options)
    parts = parts_of(wire, size, spec)
    out, done = [], 0
    for (_, like), data in zip(blocks_of(np.zeros(size), spec), parts.payload):
        rows = slice(done, done + len(data))
        x = values_of(unpack(data, spec), parts.steps[rows], parts.offsets[rows], spec)
        if spec.rotated:
            x = changed_signs(hadamard(x, 1 / 32))
        out.append(x[:, : like.shape[1]].ravel())
        done += len(data)
    return np.concatenate(out).astype(np.float32)


@silent
def dequant_reduce(
    wires: list[np.ndarray], size: int, spec: dict, out: dict, words: tuple | None = None
) -> np.ndarray:
    """Return the wire, in format `out`, of the sum of wires in format `spec`, the first one first;
    every partial sum is rounded to float32. What is rotated on both sides is summed rotated."""
    if spec["rotated"] and out["rotated"] and spec["block"] == out["block"]:
        size += -(size % spec["block"]) % 32
        spec, out = spec | {"rotated": False}, out | {"rotated": False}
    total = dequantize(wires[0], size, **spec)
    for wire in wires[1:]:
        total = total + dequantize(wire, size, **spec)
    assert total.dtype == np.float32
    return quantize(total, **out, words=words)


def swizzled(nodes: int, devices: int, chunks: int) -> list[tuple[int, int]]:
    """Return the (partition, chunk) that lies at each place, in DeepSpeed's order.

    Every first chunk, then every second one, ...; among these, first what is for device 0 of node
    0, 1, ..., then what is for device 1 of each node, ... Partition p is for device p % devices of
    node p // devices.
    """
    return [
        (node * devices + device, chunk)
        for chunk in range(chunks)
        for device in range(devices)
        for node in range(nodes)
    ]


def chances(words: tuple[int, int], starts: np.ndarray, length: int) -> np.ndarray:
    """Return the numbers in (-1/2, 1/2) that two words give to the elements of blocks.

    The elements at one place of a block's two halves share the position of the first one, which is
    hashed: a step of the golden ratio, the first word added, MurmurHash3's finalizer with the other
    word in its middle. The upper 14 bits are the first element's number, 14 of the lower 16 the
    second's, in units of 2^-14 and half a unit more.

    Args:
      words: two words of 32 bits.
      starts: the positions of the blocks' first elements, int[N].
      length: L, the number of elements in a block.

    Returns:
      float64[N, L].
    """
    half = -(-length // 2)
    word, other = (np.uint64(int(w) & 0xFFFFFFFF) for w in words)
    wrap = np.uint64(2**32 - 1)
    position = (starts[:, None] + np.arange(half)).astype(np.uint64)
    x = (position * np.uint64(0x9E3779B9) + word) & wrap
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B) & wrap
    x = (x ^ (x >> np.uint64(13)) ^ other) * np.uint64(0xC2B2AE35) & wrap
    x = x ^ (x >> np.uint64(16))
    upper_14, lower_14 = x >> np.uint64(18), x >> np.uint64(2) & np.uint64(2**14 - 1)
    drawn = np.concatenate([upper_14, lower_14], axis=1).astype(np.float64)
    return ((drawn + 0.5) / 2**14 - 0.5)[:, :length]
