"""Calls into Pallas that differ between the supported JAX versions, 0.10.2 to 0.12.

Pallas' GPU backends take 0.5 s to import, so functions import them when a kernel is traced.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]


def has_mosaic() -> bool:
    """Return whether Pallas' Mosaic GPU backend can run the kernels, as it can since JAX 0.11. In
    JAX 0.10 it finds no layout for a row along its block, and has no interpreter."""
    return JAX_VERSION >= (0, 11, 0)


def mosaic_interpreter() -> Any:
    """Return the value of `plgpu.kernel(interpret=)` that runs a kernel on the CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """Load a reference's values into registers of the given layout."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, layout=layout, optimized=False)


def mosaic_store(ref: Any, value: jax.Array) -> None:
    """Store registers to a reference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def registers(lanes: int, vector: int, run: int) -> Any:
    """Return the layout of an array [T, C] in the registers of a warpgroup.

    Args:
      lanes: the number of lanes that lie side by side. The other lanes, and the warps, lie below.
      vector: the number of neighbours that one register of a lane holds.
      run: the number of neighbours that a lane holds, in one or more registers.
    """
    below, across = 32 // lanes, lanes * run
    tiles = ((4 * below, across), (below, across), (run,))
    return _tiled(tiles, -3, -2) if run == vector else _tiled((*tiles, (vector,)), -4, -3)


def row_registers(lanes: int, count: int) -> Any:
    """Return the layout of an array [T, count] in which a lane holds whole rows.

    They are the rows of which `registers(lanes, ...)` gives the lane a part.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import Replicated

    below = 32 // lanes
    return _tiled(((4 * below, count), (below, count), (count,)), -3, Replicated(lanes))


def _tiled(tiles: tuple[tuple[int, ...], ...], below: int, across: Any) -> Any:
    """Return a layout from the shapes of tiles within tiles, the outermost first, and from the dims
    along which lanes lie. A lane's vector lies along the last dim."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = TiledLayout(
        plgpu.Tiling(tiles),
        warp_dims=(below - 2,),
        lane_dims=(below, across),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


def has_triton() -> bool:
    """Return whether Pallas still has its Triton backend."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def triton_call(
    body: Any,
    operands: list[jax.Array],
    result: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    interpret: bool,
) -> jax.Array:
    """Run a kernel of 4 warps on Pallas' Triton backend, on whole arrays in global memory."""
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        body,
        out_shape=result,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*operands)


def triton_load(ref: Any, items: jax.Array, mask: jax.Array) -> jax.Array:
    """Load items of a flat reference, with zeros where the mask is off."""
    from jax.experimental.pallas import triton

    return triton.load(ref.at[items], mask=mask, other=jnp.zeros((), ref.dtype))


def triton_store(ref: Any, items: jax.Array, mask: jax.Array, value: jax.Array) -> None:
    """Store items of a flat reference where the mask is on."""
    from jax.experimental.pallas import triton

    triton.store(ref.at[items], value, mask=mask)
