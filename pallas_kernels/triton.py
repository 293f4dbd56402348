"""Runs the kernels as Triton kernels, through jax-triton: on NVIDIA GPUs before Hopper, and for
blocks that Mosaic does not take. Both packages are optional; `shim.has_triton` says whether they
are there.

    W   number of wires, one in each row, all with the same Layout
    N   number of sources of a reduction
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import shim
from .arithmetic import Rule
from .floats import above
from .geometry import TritonTile, triton_tile
from .kernels import sizes_of_floats, sizes_of_wires
from .layout import Layout
from .scales import LONGEST, brief, shares
from .swizzle import Swizzle


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """All that a compiled kernel knows of a wire.

    Attributes:
      rule: the rule by which blocks get their codes.
      tile: the tile of a program, in elements.
      byte_tile: the same tile in bytes of a wire's payload.
      num_wires: W.
      size, block, full, num_bytes: of the layout.
      tiles: number of tiles in a wire.
      width: bytes of a block's codes.
      pieces: number of arrays that hold the elements of a tile.
      runs: number of arrays that hold its bytes.
      rotated: whether the elements are rotated.
      padded, bytes_padded: whether some columns of either tile are no elements.
      steps_at, offsets_at: where in a wire the steps and the offsets begin.
      up, down: the step as a multiple of the distance from the offset to the block's ends. Without
        offsets: from 0 to the peak.
      middle: distance between two codes, as a multiple of half the block's range.
      shrinks: whether "mse" has a shorter step to choose.
      length, fine, of_peak, of_mean: of `scales._shrunk`.
    """

    rule: Rule
    tile: TritonTile
    byte_tile: TritonTile
    num_wires: int
    size: int
    block: int
    full: int
    num_bytes: int
    tiles: int
    width: int
    pieces: int
    runs: int
    rotated: bool
    padded: bool
    bytes_padded: bool
    steps_at: int
    offsets_at: int
    up: float
    down: float
    middle: float
    shrinks: bool
    length: int
    fine: int
    of_peak: float
    of_mean: float

    @classmethod
    def of(cls, layout: Layout, tile: TritonTile, num_wires: int) -> Shape:
        """Return what a kernel knows of W wires with this layout, if it takes such tiles."""
        rule, width = layout.rule, layout.block_bytes(layout.block)
        byte_tile = tile.in_bytes(layout.pieces, width)
        up, down, middle = _distances(rule)
        of_peak, of_mean = shares(layout.block)
        return cls(
            rule=rule,
            tile=tile,
            byte_tile=byte_tile,
            num_wires=num_wires,
            size=layout.size,
            block=layout.block,
            full=layout.full,
            num_bytes=layout.num_bytes,
            tiles=-(-layout.full // tile.rows),
            width=width,
            pieces=tile.pieces,
            runs=byte_tile.pieces,
            rotated=layout.rotated,
            padded=tile.padded,
            bytes_padded=byte_tile.padded,
            steps_at=layout.row_at(0),
            offsets_at=layout.row_at(1),
            up=up,
            down=down,
            middle=middle,
            shrinks=rule.bits == 4 and of_peak < 1 / rule.half and layout.block <= LONGEST,
            length=layout.block,
            fine=min(22, 24 - math.ceil(math.log2(layout.block))) - 5,
            of_peak=float(brief(8 * of_peak)),
            of_mean=float(brief(of_mean / layout.block)),
        )


def _distances(rule: Rule) -> tuple[float, float, float]:
    """Return `Shape.up`, `down` and `middle`."""
    if rule.symmetric:
        return float(above(1 / (rule.half - (1 if rule.stochastic else 0.5)))), 0.0, 0.0
    # How many steps beyond the last code a value may lie without an error above half a step.
    reach = 0.0 if rule.stochastic else 0.5
    down, up = rule.half + reach, rule.half - 1 + reach
    return float(above(1 / up)), float(above(1 / down)), float(np.float32(2 / (down + up)))


def quantize(
    x: jax.Array,
    layout: Layout,
    seed: jax.Array | None = None,
    swizzle: Swizzle | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Quantize each row of x into a wire, as `kernels.quantize` does.

    Args:
      x: [W, layout.size], float32, bfloat16 or float16.
      layout: the layout of each wire.
      seed: int32[2], for stochastic rounding.
      swizzle: the place of each wire in the result; None keeps their order.
      interpret: whether to run on the CPU, in Triton's interpreter.

    Returns:
      uint8[W, layout.num_bytes].
    """
    tile = triton_tile(layout, **sizes_of_floats(layout, x.shape[0], 1, x.dtype))
    assert tile is not None
    shape = Shape.of(layout, tile, x.shape[0])
    constants = {"WIRE": shape, "SWIZZLE": swizzle}
    result = (x.shape[0], layout.num_bytes)
    return _run("quantize", [x, _words(seed)], result, jnp.uint8, shape, constants, interpret)


def dequant_sum(
    data: jax.Array, layout: Layout, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Sum N wires each in float32, and round the sums to dtype, as `kernels.dequant_sum` does.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of each wire.
      dtype: the dtype of the result.
      interpret: whether to run on the CPU, in Triton's interpreter.

    Returns:
      dtype[W, layout.size].
    """
    num_sources, num_wires, _ = data.shape
    tile = triton_tile(layout, **sizes_of_floats(layout, num_wires, num_sources, dtype))
    assert tile is not None
    shape = Shape.of(layout, tile, num_wires)
    constants = {"WIRE": shape, "SOURCES": num_sources}
    result = (num_wires, layout.size)
    # The interpreter does not round to the nearest bfloat16, as a GPU and XLA do.
    kept = jnp.float32 if interpret else dtype
    return _run("dequant_sum", [data], result, kept, shape, constants, interpret).astype(dtype)


def dequant_reduce(
    data: jax.Array,
    layout: Layout,
    out: Layout,
    seed: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Sum N wires each in float32, and quantize the sums, as `kernels.dequant_reduce` does.

    Args:
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of the sources, which is not rotated.
      out: the layout of the result: not rotated, with the same size and block.
      seed: int32[2], for stochastic rounding.
      interpret: whether to run on the CPU, in Triton's interpreter.

    Returns:
      uint8[W, out.num_bytes].
    """
    num_sources, num_wires, _ = data.shape
    tile = triton_tile(layout, out, **sizes_of_wires(layout, out, num_wires, num_sources))
    assert tile is not None
    shape, target = (Shape.of(x, tile, num_wires) for x in (layout, out))
    constants = {"WIRE": shape, "OUT": target, "SOURCES": num_sources}
    result = (num_wires, out.num_bytes)
    operands = [data, _words(seed)]
    return _run("dequant_reduce", operands, result, jnp.uint8, shape, constants, interpret)


def _words(seed: jax.Array | None) -> jax.Array:
    """Return the seed; zeros, which no kernel reads, if there is none."""
    return jnp.zeros(2, jnp.int32) if seed is None else seed


def _run(
    kernel: str,
    operands: list[jax.Array],
    shape: tuple[int, int],
    dtype: Any,
    wire: Shape,
    constants: dict[str, Any],
    interpret: bool,
) -> jax.Array:
    """Launch a kernel on flat operands, with one program for each tile of each wire."""
    from . import triton_kernels

    call = shim.triton_interpreted if interpret else shim.triton_call
    return call(
        getattr(triton_kernels, kernel),
        [x.reshape(-1) for x in operands],
        jax.ShapeDtypeStruct((shape[0] * shape[1],), dtype),
        wire.num_wires * wire.tiles,
        constants,
    ).reshape(shape)
