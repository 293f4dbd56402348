"""The kernels with their formats, and a GPU to compile them for on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from tools.quantize_cases import name_of
from zeroxla.config.wire_format import WireFormat
from zeroxla.pallas_kernels import kernels, mosaic, triton
from zeroxla.pallas_kernels.geometry import mosaic_tile, triton_tile

SIZE, WIRES, SOURCES = 256 * 70, 2, 8
FORMATS = [
    WireFormat(bits=8),
    WireFormat(bits=8, symmetric=False, scale="mse"),
    WireFormat(bits=8, hadamard=32),
    WireFormat(bits=8, rounding="stochastic"),
    WireFormat(bits=4),
    WireFormat(bits=4, symmetric=False, block=128),
    WireFormat(bits=4, scale="bound", hadamard=32, block=128),
    WireFormat(bits=4, scale="deepspeed"),
    WireFormat(bits=8, block=17),
    WireFormat(bits=8, scale="deepspeed", symmetric=False, block=2048),
]

Variant = tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]


def variants(backend: str) -> Iterator[tuple[str, Variant]]:
    """Yield (name, (function, shapes)) for every kernel of a backend, "mosaic" or "triton", with
    every format that it takes."""
    module, tile = {"mosaic": (mosaic, mosaic_tile), "triton": (triton, triton_tile)}[backend]
    for format in FORMATS:
        layout = format.layout(SIZE)
        if tile(layout, **kernels.sizes_of_floats(layout, WIRES, 1, jnp.float32)) is None:
            assert (backend, format.scale) == ("mosaic", "deepspeed")
            continue
        for kernel, variant in _kernels(module, format).items():
            yield f"{backend}-{kernel}-{name_of(format)}", variant


def _kernels(backend: Any, format: WireFormat) -> dict[str, Variant]:
    layout = format.layout(SIZE)
    x = jax.ShapeDtypeStruct((WIRES, SIZE), jnp.float32)
    half = jax.ShapeDtypeStruct((WIRES, SIZE), jnp.bfloat16)
    wires = jax.ShapeDtypeStruct((SOURCES, WIRES, layout.num_bytes), jnp.uint8)
    if format.rounding == "stochastic":
        seed = jax.ShapeDtypeStruct((2,), jnp.int32)
        return {"quantize": (lambda x, s: backend.quantize(x, layout, s), [x, seed])}
    found: dict[str, Variant] = {
        "quantize": (lambda x: backend.quantize(x, layout), [x]),
        "quantize-bfloat16": (lambda x: backend.quantize(x, layout), [half]),
        "dequant_sum": (
            lambda w: backend.dequant_sum(w, layout, jnp.bfloat16),
            [wires],
        ),
    }
    if not format.hadamard:
        found["dequant_reduce"] = (
            lambda w: backend.dequant_reduce(w, layout, layout),
            [wires],
        )
    return found


def on(device: str) -> AbstractMesh:
    """Return a mesh of one GPU, such as "NVIDIA A100", which tells Triton what it compiles for."""
    from jax.sharding import AbstractDevice  # since JAX 0.11

    abstract = AbstractDevice(device, None, "gpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
