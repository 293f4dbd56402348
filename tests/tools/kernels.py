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


def variants() -> Iterator[tuple[str, str, Variant]]:
    """Yield (backend, name, (function, shapes)) for every kernel with every format that it
    takes."""
    for name, backend in (("mosaic", mosaic.BACKEND), ("triton", triton.BACKEND)):
        for format in FORMATS:
            layout = format.layout(SIZE)
            if (
                backend.tile(layout, **kernels.sizes_of_floats(layout, WIRES, 1, jnp.float32))
                is None
            ):
                assert format.hadamard if name == "triton" else format.scale == "deepspeed"
                continue
            for kernel, variant in _kernels(backend, format).items():
                yield name, f"{name}-{kernel}-{name_of(format)}", variant


def _kernels(backend: Any, format: WireFormat) -> dict[str, Variant]:
    layout = format.layout(SIZE)
    x = jax.ShapeDtypeStruct((WIRES, SIZE), jnp.float32)
    half = jax.ShapeDtypeStruct((WIRES, SIZE), jnp.bfloat16)
    wires = jax.ShapeDtypeStruct((SOURCES, WIRES, layout.num_bytes), jnp.uint8)
    if format.rounding == "stochastic":
        seed = jax.ShapeDtypeStruct((2,), jnp.int32)
        return {"quantize": (lambda x, s: kernels.quantize(backend, x, layout, s), [x, seed])}
    found: dict[str, Variant] = {
        "quantize": (lambda x: kernels.quantize(backend, x, layout), [x]),
        "quantize-bfloat16": (lambda x: kernels.quantize(backend, x, layout), [half]),
        "dequant_sum": (
            lambda w: kernels.dequant_sum(backend, w, layout, jnp.bfloat16),
            [wires],
        ),
    }
    if not format.hadamard:
        found["dequant_reduce"] = (
            lambda w: kernels.dequant_reduce(backend, w, layout, layout),
            [wires],
        )
    return found


def h200() -> AbstractMesh:
    """Return a mesh of one H200, which tells Pallas' Triton backend what GPU it compiles for."""
    from jax.sharding import AbstractDevice  # since JAX 0.11

    device = AbstractDevice("NVIDIA H200", None, "gpu")
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
