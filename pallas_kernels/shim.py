"""What differs between the supported JAX versions (0.10.2 to 0.12) in Pallas, in one place.

Pallas' GPU backends take 0.5 s to import, and are imported where a kernel is traced.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

JAX_VERSION: tuple[int, ...] = jax.__version_info__[:3]


def has_mosaic() -> bool:
    """Return whether Pallas' Mosaic GPU backend does what the kernels need: since JAX 0.11. That of
    0.10 finds no layout for a row along its block, and has no interpreter."""
    return JAX_VERSION >= (0, 11, 0)


def mosaic_interpreter() -> Any:
    """Return what makes `plgpu.kernel(interpret=)` run a kernel on the CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def mosaic_load(ref: Any, layout: Any) -> jax.Array:
    """Return a reference's values in registers, laid out so."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.load(ref, layout=layout, optimized=False)


def mosaic_store(ref: Any, value: jax.Array) -> None:
    """Write registers to a reference."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def tiled(tiles: tuple[tuple[int, ...], ...], *, warps: int, lanes: Any, vector: int) -> Any:
    """Return a layout of registers: tiles within tiles, and the dims that the warps of a warpgroup,
    the lanes of a warp and the vector of a lane run along, counted from the end."""
    from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = TiledLayout(
        plgpu.Tiling(tiles),
        warp_dims=(warps,),
        lane_dims=tuple(lanes),
        vector_dim=vector,
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
    """Run a kernel on Pallas' Triton backend, with whole arrays in global memory; 4 warps."""
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        body,
        out_shape=result,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(*operands)


def triton_load(ref: Any, items: jax.Array, mask: jax.Array) -> jax.Array:
    """Return items of a flat reference, zero where the mask is off."""
    from jax.experimental.pallas import triton

    return triton.load(ref.at[items], mask=mask, other=jnp.zeros((), ref.dtype))


def triton_store(ref: Any, items: jax.Array, mask: jax.Array, value: jax.Array) -> None:
    """Write items of a flat reference where the mask is on."""
    from jax.experimental.pallas import triton

    triton.store(ref.at[items], value, mask=mask)


def triton_assembly(text: str, x: jax.Array) -> jax.Array:
    """Return a PTX instruction's result for each element, of the same dtype."""
    from jax.experimental.pallas import triton

    (y,) = triton.elementwise_inline_asm(
        text,
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return y
