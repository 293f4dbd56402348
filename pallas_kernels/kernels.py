"""The three kernels for any backend: their inputs, their outputs, and how they are launched.

    W   number of wires, one in each row, all with the same Layout
    N   number of sources of a reduction

No kernel computes the short last block of a wire. Its place in the result is undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import program
from .layout import Layout
from .swizzle import Swizzle


class Backend(NamedTuple):
    """The functions that run kernels on one of Pallas' backends.

    Attributes:
      tile: (layouts of both sides..., items=, item_bytes=, num_wires=) -> the tile of a program,
        whose number of blocks is `rows`; None if the kernel does not fit (geometry.py).
      open: (tile, layout, interpret) -> (program.Tile, wire, first block) of the running program.
      launch: (body, operands, result, grid, interpret) -> the flat result.
    """

    tile: Callable[..., Any]
    open: Callable[[Any, Layout, bool], tuple[program.Tile, Any, Any]]
    launch: Callable[[Any, list[jax.Array], jax.ShapeDtypeStruct, tuple[int, int], bool], jax.Array]


def quantize(
    backend: Backend,
    x: jax.Array,
    layout: Layout,
    seed: jax.Array | None = None,
    swizzle: Swizzle | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Quantize each row of x into a wire.

    Args:
      backend: a backend that has a tile for these sizes.
      x: [W, layout.size], float32, bfloat16 or float16.
      layout: the layout of each wire.
      seed: int32[2], for stochastic rounding.
      swizzle: the place of each wire in the result; None keeps their order.
      interpret: whether to run on the CPU, in Pallas' interpreter.

    Returns:
      uint8[W, layout.num_bytes].
    """
    tile = backend.tile(layout, **sizes_of_floats(layout, x.shape[0], 1, x.dtype))

    def body(*refs: Any) -> None:
        x_ref, *seed_ref, out_ref = refs
        memory, wire, first = backend.open(tile, layout, interpret)
        target = wire if swizzle is None else swizzle.target(wire)
        pieces = program.read_floats(memory, x_ref, wire, first, layout)
        program.write_wire(
            memory, out_ref, target, first, pieces, layout, seed=_words(seed_ref), source=wire
        )

    shape = (x.shape[0], layout.num_bytes)
    return _run(backend, body, [x, seed], shape, jnp.uint8, tile, layout, interpret)


def dequant_sum(
    backend: Backend, data: jax.Array, layout: Layout, dtype: Any, *, interpret: bool = False
) -> jax.Array:
    """Sum N wires each in float32, and round the sums to dtype.

    Args:
      backend: a backend that has a tile for these sizes.
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of each wire.
      dtype: the dtype of the result.
      interpret: whether to run on the CPU, in Pallas' interpreter.

    Returns:
      dtype[W, layout.size].
    """
    num_sources, num_wires, _ = data.shape
    tile = backend.tile(layout, **sizes_of_floats(layout, num_wires, num_sources, dtype))

    def body(in_ref: Any, out_ref: Any) -> None:
        memory, wire, first = backend.open(tile, layout, interpret)
        pieces = program.read_wires(memory, in_ref, wire, first, layout, num_sources, num_wires)
        program.write_floats(memory, out_ref, wire, first, pieces, layout)

    shape = (num_wires, layout.size)
    return _run(backend, body, [data], shape, dtype, tile, layout, interpret)


def dequant_reduce(
    backend: Backend,
    data: jax.Array,
    layout: Layout,
    out: Layout,
    seed: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Sum N wires each in float32, and quantize the sums.

    Args:
      backend: a backend that has a tile for these sizes.
      data: uint8[N, W, layout.num_bytes].
      layout: the layout of the sources, which is not rotated.
      out: the layout of the result: not rotated, with the same size and block.
      seed: int32[2], for stochastic rounding.
      interpret: whether to run on the CPU, in Pallas' interpreter.

    Returns:
      uint8[W, out.num_bytes].
    """
    num_sources, num_wires, _ = data.shape
    tile = backend.tile(layout, out, **sizes_of_wires(layout, out, num_wires, num_sources))

    def body(*refs: Any) -> None:
        in_ref, *seed_ref, out_ref = refs
        memory, wire, first = backend.open(tile, layout, interpret)
        pieces = program.read_wires(memory, in_ref, wire, first, layout, num_sources, num_wires)
        program.write_wire(
            memory, out_ref, wire, first, pieces, out, seed=_words(seed_ref), source=wire
        )

    shape = (num_wires, out.num_bytes)
    return _run(backend, body, [data, seed], shape, jnp.uint8, tile, layout, interpret)


def sizes_of_floats(layout: Layout, num_wires: int, num_sources: int, dtype: Any) -> dict[str, int]:
    """Return the sizes that a tile depends on, for a kernel between N sources of wires and
    floats."""
    return {
        "items": num_wires * max(layout.size, num_sources * layout.num_bytes),
        "item_bytes": jnp.dtype(dtype).itemsize,
        "num_wires": num_wires,
    }


def sizes_of_wires(layout: Layout, out: Layout, num_wires: int, num_sources: int) -> dict[str, int]:
    """Return the sizes that a tile depends on, for a kernel from N sources of wires to wires."""
    items = num_wires * max(num_sources * layout.num_bytes, out.num_bytes)
    return {"items": items, "item_bytes": 1, "num_wires": num_wires}


def _words(seed_ref: list[Any]) -> tuple[Any, Any] | None:
    """Return both halves of the seed; None if there is no seed."""
    return (seed_ref[0][0], seed_ref[0][1]) if seed_ref else None


def _run(
    backend: Backend,
    body: Any,
    operands: list[jax.Array | None],
    shape: tuple[int, int],
    dtype: Any,
    tile: Any,
    layout: Layout,
    interpret: bool,
) -> jax.Array:
    """Launch a kernel on flat operands, with a grid of (wires, tiles)."""
    flat = [x.reshape(-1) for x in operands if x is not None]
    result = jax.ShapeDtypeStruct((shape[0] * shape[1],), dtype)
    grid = (shape[0], -(-layout.full // tile.rows))
    return backend.launch(body, flat, result, grid, interpret).reshape(shape)
