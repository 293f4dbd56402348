"""`Wire`: a quantized array as one buffer of bytes, and the checks of the functions on wires.

`quantize.py` makes wires and reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.config.wire_format import WireFormat
from zeroxla.pallas_kernels.layout import Layout

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Wire:
    """A quantized array, or several of one size and format.

    Attributes:
      buffer: uint8[..., format.num_bytes(size)]; the leading dims count wires.
      size: number of elements in the array that each wire encodes.
      format: the format of all of them.
    """

    buffer: jax.Array
    size: int = dataclasses.field(metadata={"static": True})
    format: WireFormat = dataclasses.field(metadata={"static": True})


def check_shape(wire: Wire, shape: Sequence[int], dtype: Any, name: str) -> Layout:
    """Check the shape and the dtype that a wire is to be dequantized to; return its layout."""
    shape = tuple(shape)
    if math.prod(shape) != wire.size:
        raise ValueError(
            f"{name}: shape {shape} has {math.prod(shape)} elements, and the wire stands for "
            f"{wire.size}; give the shape of the quantized array"
        )
    if jnp.dtype(dtype) not in _FLOATS:
        raise ValueError(f"{name}: dtype {jnp.dtype(dtype)} is not float32, bfloat16 or float16")
    return check_buffer(wire, name)


def check_floating(x: jax.Array, name: str) -> jax.Array:
    """Return x as an array; refuse other dtypes and empty arrays."""
    x = jnp.asarray(x)
    if x.dtype not in _FLOATS:
        raise ValueError(
            f"{name}: an array of {x.dtype}, shape {x.shape}; it takes float32, bfloat16 and "
            "float16: convert it, or leave it as it is on the wire"
        )
    if not x.size:
        raise ValueError(f"{name}: an array of shape {x.shape} has no elements to quantize")
    return x


def check_sources(wires: Wire, name: str) -> None:
    """Check that wires have a first dim of sources."""
    if wires.buffer.ndim < 2 or not wires.buffer.shape[0]:
        raise ValueError(
            f"{name}: a buffer of shape {wires.buffer.shape} has no sources; stack the wires along "
            "a first dim"
        )


def check_buffer(wire: Wire, name: str) -> Layout:
    """Check that a buffer has the bytes of its format; return the layout."""
    layout = wire.format.layout(wire.size)
    shape, dtype = wire.buffer.shape, wire.buffer.dtype
    if dtype != np.uint8 or not shape or shape[-1] != layout.num_bytes:
        raise ValueError(
            f"{name}: a buffer of {dtype}{list(shape)}, but a wire of {wire.size} elements in "
            f"{wire.format} is uint8[..., {layout.num_bytes}]; pass the buffer as quantize made it"
        )
    return layout


def seed_of(format: WireFormat, key: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    """Return the seed of stochastic rounding; None for rounding to nearest."""
    if (key is not None) != (format.rounding == "stochastic"):
        raise ValueError(
            f"key={'None' if key is None else 'given'} with rounding={format.rounding!r}: "
            "stochastic rounding takes a PRNG key, and rounding to the nearest takes none"
        )
    if key is None:
        return None
    words = jax.lax.bitcast_convert_type(jax.random.bits(key, (2,), jnp.uint32), jnp.int32)
    return words[0], words[1]
