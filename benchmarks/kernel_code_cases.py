"""The kernels whose machine code kernel_code.py reads: their formats and what they move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.pallas_kernels import kernels
from zeroxla.pallas_kernels.geometry import MosaicTile, TritonTile, mosaic_tile, triton_tile
from zeroxla.pallas_kernels.layout import Layout
from zeroxla.pallas_kernels.swizzle import Swizzle
from zeroxla.quantize import WireFormat

SIZE = 1 << 26
NODES, DEVICES = 2, 4
SEED = jax.ShapeDtypeStruct((2,), jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its formats.

    Attributes:
      name: its name in tables.
      kind: a key of DUE.
      function: (mosaic.py or triton.py, arguments) -> the kernel's result.
      shapes: the arguments.
      mosaic: the blocks of a wire that a block of threads takes.
      triton: the same for a Triton kernel; None if there is none.
      read, written: bytes of an element in memory: of floats, or of all sources' wires.
      element_bytes: of what a lane loads and stores, of one source: floats or codes.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    shapes: list[jax.ShapeDtypeStruct]
    mosaic: MosaicTile
    triton: TritonTile | None
    read: float
    written: float
    element_bytes: tuple[float, float]


def cases() -> Iterator[Case]:
    """Yield every kernel that is compiled."""
    for dtype in ("float32", "bfloat16"):
        for bits in (8, 4):
            for block in (128, 256, 2048):
                yield from _with_floats(WireFormat(bits=bits, block=block), dtype)
            for block in (128, 256):
                yield from _with_floats(WireFormat(bits=bits, block=block, hadamard=32), dtype)
            yield from _with_floats(WireFormat(bits=bits, rounding="stochastic"), dtype)
    for num_sources in (4, 8):
        for bits in (8, 4):
            format = WireFormat(bits=bits)
            yield _sum(f"int{bits}, {num_sources} sources", "sum", format, format, num_sources)
        source, target = (WireFormat(bits=b, block=128, hadamard=32) for b in (8, 4))
        name = f"int8 to int4, block 128, rotated, {num_sources} sources"
        yield _sum(name, "sum, 8 to 4 bits", source, target, num_sources)


def _with_floats(format: WireFormat, dtype: str) -> Iterator[Case]:
    stochastic = format.rounding == "stochastic"
    words = [f"int{format.bits}", dtype, f"block {format.block}"]
    words += ["rotated"] * bool(format.hadamard) + ["stochastic"] * stochastic
    kind = "rotated" if format.hadamard else "stochastic" if stochastic else "plain"
    item = jnp.dtype(dtype).itemsize
    wire = format.num_bytes(SIZE) / SIZE
    for kernel, num_wires in (("quantize", 1), ("swizzled_quantize", NODES * DEVICES)):
        layout = format.layout(SIZE // num_wires)
        swizzle = Swizzle(nodes=NODES, devices=DEVICES, chunks=1) if num_wires > 1 else None
        if swizzle is not None and stochastic:
            continue
        x = jax.ShapeDtypeStruct((num_wires, layout.size), dtype)
        yield Case(
            name=f"{kernel}, {', '.join(words)}",
            kind=kind,
            function=_quantize(layout, swizzle),
            shapes=[x, SEED] if stochastic else [x],
            **_tiles(layout, **kernels.sizes_of_floats(layout, num_wires, 1, x.dtype)),
            read=item,
            written=wire,
            element_bytes=(item, format.bits / 8),
        )
    if stochastic:
        return
    layout = format.layout(SIZE)
    yield Case(
        name=f"dequantize, {', '.join(words)}",
        kind=kind,
        function=lambda backend, data: backend.dequant_sum(data, layout, dtype),
        shapes=[jax.ShapeDtypeStruct((1, 1, layout.num_bytes), jnp.uint8)],
        **_tiles(layout, **kernels.sizes_of_floats(layout, 1, 1, dtype)),
        read=wire,
        written=item,
        element_bytes=(format.bits / 8, item),
    )


def _quantize(layout: Layout, swizzle: Swizzle | None) -> Callable[..., Any]:
    return lambda backend, x, seed=None: backend.quantize(x, layout, seed, swizzle)


def _sum(name: str, kind: str, source: WireFormat, target: WireFormat, num_sources: int) -> Case:
    layout, out = source.layout(SIZE), target.layout(SIZE)
    if source.hadamard:  # the rotated numbers are summed
        layout, out = layout.as_rotated_data(), out.as_rotated_data()
    return Case(
        name=f"dequant_reduce, {name}",
        kind=kind,
        function=lambda backend, data: backend.dequant_reduce(data, layout, out),
        shapes=[jax.ShapeDtypeStruct((num_sources, 1, layout.num_bytes), jnp.uint8)],
        **_tiles(layout, out, **kernels.sizes_of_wires(layout, out, 1, num_sources)),
        read=num_sources * source.num_bytes(SIZE) / SIZE,
        written=target.num_bytes(SIZE) / SIZE,
        element_bytes=(source.bits / 8, target.bits / 8),
    )


def _tiles(*layouts: Layout, **sizes: int) -> dict[str, Any]:
    tile = mosaic_tile(*layouts, **sizes)
    assert tile is not None
    return {"mosaic": tile, "triton": triton_tile(*layouts, **sizes)}
