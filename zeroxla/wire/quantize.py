"""Wire formats: arrays as 8-bit or 4-bit codes with a step for every block.

`quantize` turns an array into a `Wire`, one buffer of bytes that a single collective can move, and
`dequantize` turns it back. On NVIDIA GPUs they run as Pallas kernels, elsewhere as plain XLA, made
to give the same bits. Neither has a gradient: a `custom_vjp` has to span both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zeroxla.config.wire_format import WireFormat
from zeroxla.pallas_kernels import dispatch
from zeroxla.pallas_kernels.swizzle import Swizzle
from zeroxla.wire.wire import (
    Wire,
    check_buffer,
    check_floating,
    check_shape,
    check_sources,
    seed_of,
)

__all__ = [
    "Wire",
    "WireFormat",
    "dequant_reduce",
    "dequant_sum",
    "dequantize",
    "quantize",
    "swizzled_quantize",
]

Backend = Literal["xla", "mosaic", "triton"]


def quantize(
    x: jax.Array,
    format: WireFormat,
    *,
    lead: int = 0,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> Wire:
    """Quantize x into a wire, or into several wires.

    A block with an inf, a NaN or a magnitude of 2^126 or more becomes NaN as a whole. A block whose
    magnitudes are all below 2^-90 becomes zeros.

    Args:
      x: float32, bfloat16 or float16, of any shape; blocks run along the flat array.
      format: the format of the wires.
      lead: number of leading dims of x that count wires. The array at each of their indices becomes
        a wire of its own.
      key: a PRNG key, for stochastic rounding and only for it.
      backend: None takes the kernel that fits on NVIDIA GPUs, and XLA elsewhere or where none fits.
        "xla", "mosaic" and "triton" force a backend, and raise where it does not fit. A
        forced kernel runs in an interpreter without a GPU, which is slow.

    Returns:
      A wire of x.size elements; with `lead`, wires [*x.shape[:lead]] of the remaining dims.

    Raises:
      ValueError: x has another dtype or no elements, `lead` is not a number of its dims, a key is
        missing or has no use, or the backend cannot take such blocks.

    Cost: reads x and writes the wire once; no other memory.

    Example:
      >>> import jax.numpy as jnp
      >>> from zeroxla.quantize import WireFormat, dequantize, quantize
      >>> wire = quantize(jnp.arange(-4.0, 4.0), WireFormat(bits=4, scale="deepspeed"))
      >>> wire.buffer.nbytes  # 4 of codes, 4 of the step, 8 of padding
      16
      >>> print(dequantize(wire, (2, 4), jnp.float32))
      [[-4. -3. -2. -1.]
       [ 0.  1.  2.  3.]]
    """
    x = check_floating(x, "quantize")
    if not 0 <= lead <= x.ndim:
        raise ValueError(
            f"quantize: lead={lead} for an array of shape {x.shape}; it counts leading dims, at "
            f"most {x.ndim}"
        )
    size = math.prod(x.shape[lead:])
    data = dispatch.quantize(
        x.reshape(-1, size),
        format.layout(size),
        seed=seed_of(format, key),
        swizzle=None,
        backend=backend,
    )
    return Wire(data.reshape(*x.shape[:lead], -1), size, format)


def dequantize(
    wire: Wire,
    shape: Sequence[int],
    dtype: Any = jnp.float32,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Return the array that a wire encodes, or the arrays of several wires.

    Args:
      wire: a result of `quantize`.
      shape: the shape of one wire's array, of size wire.size.
      dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.
      backend: as for `quantize`.

    Returns:
      dtype[..., *shape], with the leading dims of wire.buffer.

    Raises:
      ValueError: the shape has another size, the dtype is another, or the buffer is not as long as
        the format says.

    Cost: reads the wire and writes the array once; no other memory.
    """
    check_shape(wire, shape, dtype, "dequantize")
    stacked = Wire(wire.buffer[None], wire.size, wire.format)
    return dequant_sum(stacked, shape, dtype, backend=backend)


def dequant_sum(
    wires: Wire,
    shape: Sequence[int],
    dtype: Any = jnp.float32,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Return the sum of the arrays that N wires encode, added in float32.

    Args:
      wires: buffer uint8[N, ..., bytes]; the sum is over N, source 0 first.
      shape: the shape of one wire's array, of size wires.size.
      dtype: the dtype of the sum, which is rounded once: float32, bfloat16 or float16.
      backend: as for `quantize`.

    Returns:
      dtype[..., *shape].

    Raises:
      ValueError: for the reasons of `dequantize`, or because there is no source dim.

    Cost: reads N wires and writes one array; no other memory.
    """
    layout = check_shape(wires, shape, dtype, "dequant_sum")
    check_sources(wires, "dequant_sum")
    num_sources, *lead, num_bytes = wires.buffer.shape
    data = wires.buffer.reshape(num_sources, -1, num_bytes)
    x = dispatch.dequant_sum(data, layout, dtype=jnp.dtype(dtype), backend=backend)
    return x.reshape(*lead, *shape)


def swizzled_quantize(
    x: jax.Array,
    format: WireFormat,
    *,
    nodes: int,
    devices: int,
    chunks: int = 1,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> Wire:
    """Return the wires of an array laid out by rank, in the order of an all-to-all over `device`.

    x is nodes x devices partitions, each of them `chunks` chunks. Chunk c of partition p becomes
    wire [c, (p % devices) x nodes + p // devices].

    Args:
      x: float32, bfloat16 or float16, of any shape whose size divides by nodes x devices x chunks.
      format: the format of each wire.
      nodes: number of nodes.
      devices: number of devices in a node.
      chunks: number of chunks in a partition (DeepSpeed's pipelining).
      key: a PRNG key for stochastic rounding.
      backend: as for `quantize`.

    Returns:
      Wires [chunks, nodes x devices], each of x.size / (nodes x devices x chunks) elements.

    Raises:
      ValueError: for the reasons of `quantize`, or because the size does not divide.

    Source: DeepSpeed, `csrc/quantization/swizzled_quantize.cu`.
    """
    x = check_floating(x, "swizzled_quantize")
    counts = {"nodes": nodes, "devices": devices, "chunks": chunks}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"swizzled_quantize: {name}={count}; it is at least 1")
    swizzle = Swizzle(**counts)
    if x.size % swizzle.num_wires:
        raise ValueError(
            f"swizzled_quantize: {x.size} elements do not divide into {nodes} nodes x {devices} "
            f"devices x {chunks} chunks; pad x to a multiple of {swizzle.num_wires}"
        )
    size = x.size // swizzle.num_wires
    data = dispatch.quantize(
        x.reshape(swizzle.num_wires, size),
        format.layout(size),
        seed=seed_of(format, key),
        swizzle=swizzle,
        backend=backend,
    )
    return Wire(data.reshape(chunks, nodes * devices, -1), size, format)


def dequant_reduce(
    wires: Wire,
    format: WireFormat | None = None,
    *,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> Wire:
    """Return the wire of the sum of N wires: dequantize, sum in float32, quantize, in one pass.

    Args:
      wires: buffer uint8[N, ..., bytes]; the sum is over N, source 0 first.
      format: the format of the result. None means the format of the sources.
      key: a PRNG key for stochastic rounding.
      backend: as for `quantize`.

    Returns:
      Wires [...].

    Raises:
      ValueError: for the reasons of `quantize` and `dequantize`, or because there is no source dim.

    Cost: reads N wires and writes one. Where the two formats differ in block or rotation, it takes
    two passes, with the float32 sum in between. Where both are rotated alike, the rotated elements
    are summed, and nothing is rotated.

    Source: DeepSpeed, `csrc/quantization/quant_reduce.cu`.
    """
    format = wires.format if format is None else format
    layout = check_buffer(wires, "dequant_reduce")
    check_sources(wires, "dequant_reduce")
    num_sources, *lead, num_bytes = wires.buffer.shape
    out = dispatch.dequant_reduce(
        wires.buffer.reshape(num_sources, -1, num_bytes),
        layout,
        format.layout(wires.size),
        seed=seed_of(format, key),
        backend=backend,
    )
    return Wire(out.reshape(*lead, -1), wires.size, format)
