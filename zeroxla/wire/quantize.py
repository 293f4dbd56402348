"""Wire formats: arrays as 8-bit or 4-bit codes with a step for every block.

`quantize` turns an array into a `Wire`, one buffer of bytes that a single collective can move, and
`dequantize` turns it back. On NVIDIA GPUs they run as Pallas kernels, elsewhere as plain XLA; the
bits are the same. Neither has a gradient: a `custom_vjp` has to span both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.config.wire_format import WireFormat
from zeroxla.pallas_kernels import dispatch
from zeroxla.pallas_kernels.layout import Layout
from zeroxla.pallas_kernels.swizzle import Swizzle

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

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """A quantized array, or several of one size and format.

    Attributes:
      buffer: uint8[..., format.num_bytes(size)]; leading dims are so many wires.
      size: elements of the array that each wire stands for.
      format: how they were quantized.
    """

    buffer: jax.Array
    size: int = dataclasses.field(metadata={"static": True})
    format: WireFormat = dataclasses.field(metadata={"static": True})


def quantize(
    x: jax.Array,
    format: WireFormat,
    *,
    lead: int = 0,
    key: jax.Array | None = None,
    backend: Backend | None = None,
) -> Wire:
    """Return x as a wire, or as several.

    A block with an inf, a NaN or a magnitude from 2^126 on becomes NaN as a whole; one whose
    magnitudes are all below 2^-90 becomes zeros.

    Args:
      x: float32, bfloat16 or float16, of any shape; blocks run along the flat array.
      format: how.
      lead: so many leading dims of x count wires: each of their arrays becomes a wire of its own.
      key: a PRNG key, for stochastic rounding and only for it.
      backend: None takes the Pallas kernel that fits on NVIDIA GPUs, and XLA elsewhere or where
        none fits. "xla", "mosaic" and "triton" take that one, and raise where it does not fit;
        a kernel asked for without a GPU runs in Pallas' interpreter, slowly.

    Returns:
      A wire of x.size elements; wires [*x.shape[:lead]] of the size of the rest.

    Raises:
      ValueError: x is not of one of those dtypes or empty, `lead` is not a number of its dims, a
        key is missing or without use, or the backend can not take such blocks.

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
    x = _floating(x, "quantize")
    if not 0 <= lead <= x.ndim:
        raise ValueError(
            f"quantize: lead={lead} for an array of shape {x.shape}; it counts leading dims, at "
            f"most {x.ndim}"
        )
    size = math.prod(x.shape[lead:])
    data = dispatch.quantize(
        x.reshape(-1, size),
        format.layout(size),
        seed=_seed(format, key),
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
    """Return the array that a wire stands for, or the arrays of several wires.

    Args:
      wire: of `quantize`.
      shape: of the array of one wire; its size is wire.size.
      dtype: float32, bfloat16 or float16; values are computed in float32 and rounded once.
      backend: as for `quantize`.

    Returns:
      dtype[..., *shape], with the leading dims of wire.buffer.

    Raises:
      ValueError: the shape has another size, the dtype is another, or the buffer is not as long as
        the format says.

    Cost: reads the wire and writes the array once; no other memory.
    """
    _check_shape(wire, shape, dtype, "dequantize")
    stacked = Wire(wire.buffer[None], wire.size, wire.format)
    return dequant_sum(stacked, shape, dtype, backend=backend)


def dequant_sum(
    wires: Wire,
    shape: Sequence[int],
    dtype: Any = jnp.float32,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Return the sum of the arrays that N wires stand for, added in float32.

    Args:
      wires: buffer uint8[N, ..., bytes]; the sum is over N, source 0 first.
      shape: of the array of one wire; its size is wires.size.
      dtype: of the sum, which is rounded to it once: float32, bfloat16 or float16.
      backend: as for `quantize`.

    Returns:
      dtype[..., *shape].

    Raises:
      ValueError: as `dequantize`, or there is no source dim.

    Cost: reads N wires and writes one array; no other memory.
    """
    layout = _check_shape(wires, shape, dtype, "dequant_sum")
    _check_sources(wires, "dequant_sum")
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
      format: of each wire.
      nodes: of the mesh.
      devices: of a node.
      chunks: of a partition (DeepSpeed's pipelining).
      key: for stochastic rounding.
      backend: as for `quantize`.

    Returns:
      Wires [chunks, nodes x devices], each of x.size / (nodes x devices x chunks) elements.

    Raises:
      ValueError: as `quantize`, or the size does not divide.

    Source: DeepSpeed, `csrc/quantization/swizzled_quantize.cu`.
    """
    x = _floating(x, "swizzled_quantize")
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
        seed=_seed(format, key),
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
      format: of the result; None: that of the sources.
      key: for stochastic rounding.
      backend: as for `quantize`.

    Returns:
      Wires [...].

    Raises:
      ValueError: as `quantize` and `dequantize`, or there is no source dim.

    Cost: reads N wires and writes one. Where the two formats differ in block or rotation, it takes
    two passes, with the float32 sum in between. Where both are rotated alike, the rotated elements
    are summed, and nothing is rotated.

    Source: DeepSpeed, `csrc/quantization/quant_reduce.cu`.
    """
    format = wires.format if format is None else format
    layout = _checked(wires, "dequant_reduce")
    _check_sources(wires, "dequant_reduce")
    num_sources, *lead, num_bytes = wires.buffer.shape
    out = dispatch.dequant_reduce(
        wires.buffer.reshape(num_sources, -1, num_bytes),
        layout,
        format.layout(wires.size),
        seed=_seed(format, key),
        backend=backend,
    )
    return Wire(out.reshape(*lead, -1), wires.size, format)


def _check_shape(wire: Wire, shape: Sequence[int], dtype: Any, name: str) -> Layout:
    """Check what a wire is to become; return its layout."""
    shape = tuple(shape)
    if math.prod(shape) != wire.size:
        raise ValueError(
            f"{name}: shape {shape} has {math.prod(shape)} elements, and the wire stands for "
            f"{wire.size}; give the shape of the quantized array"
        )
    if jnp.dtype(dtype) not in _FLOATS:
        raise ValueError(f"{name}: dtype {jnp.dtype(dtype)} is not float32, bfloat16 or float16")
    return _checked(wire, name)


def _floating(x: jax.Array, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype not in _FLOATS:
        raise ValueError(
            f"{name}: an array of {x.dtype}, shape {x.shape}; it takes float32, bfloat16 and "
            "float16: convert it, or leave it as it is on the wire"
        )
    if not x.size:
        raise ValueError(f"{name}: an array of shape {x.shape} has no elements to quantize")
    return x


def _check_sources(wires: Wire, name: str) -> None:
    if wires.buffer.ndim < 2 or not wires.buffer.shape[0]:
        raise ValueError(
            f"{name}: a buffer of shape {wires.buffer.shape} has no sources; stack the wires along "
            "a first dim"
        )


def _checked(wire: Wire, name: str) -> Layout:
    layout = wire.format.layout(wire.size)
    shape, dtype = wire.buffer.shape, wire.buffer.dtype
    if dtype != np.uint8 or not shape or shape[-1] != layout.num_bytes:
        raise ValueError(
            f"{name}: a buffer of {dtype}{list(shape)}, but a wire of {wire.size} elements in "
            f"{wire.format} is uint8[..., {layout.num_bytes}]; pass the buffer as quantize made it"
        )
    return layout


def _seed(format: WireFormat, key: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    if (key is not None) != (format.rounding == "stochastic"):
        raise ValueError(
            f"key={'None' if key is None else 'given'} with rounding={format.rounding!r}: "
            "stochastic rounding takes a PRNG key, and rounding to the nearest takes none"
        )
    if key is None:
        return None
    words = jax.lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)
    return words[0], words[1]
