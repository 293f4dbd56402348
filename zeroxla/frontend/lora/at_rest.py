"""Stores a frozen base: as floats, or its dense leaves as wires of 8 or 4 bits."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.wire_format import WireFormat
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.wire.quantize_jit import dequantize, quantize
from zeroxla.wire.wire import Wire

Frozen = Literal["int8", "int4"]

FORMATS = {
    # No error exceeds half a step; scales add 1.6 %.
    "int8": WireFormat(bits=8, block=256, scale="bound"),
    # Each block has the step with the smallest squared error of several; scales (bfloat16) add
    # 6.25 %.
    "int4": WireFormat(bits=4, block=64, scale="mse"),
}

# Layers with fewer elements stay floats, as with the default of `ZeroConfig.quantize_threshold`.
MIN_ELEMENTS = 4096


def format_of(leaf: DenseLeaf, frozen: Frozen | None) -> WireFormat | None:
    """Return the format in which a dense leaf is stored; None for floats."""
    return None if frozen is None or layer_size(leaf) < MIN_ELEMENTS else FORMATS[frozen]


def layer_size(leaf: DenseLeaf) -> int:
    """Return the number of elements in one layer."""
    return math.prod(leaf.shape) // math.prod(leaf.sizes(leaf.layer_dims))


def as_wires(values: jax.Array, leaf: DenseLeaf, format: WireFormat) -> jax.Array:
    """Return a leaf as wires, one for each layer: uint8[*layers, bytes].

    Cost: memory for one layer as floats beside the leaf. Layers are quantized one after another.
    """
    lead = len(leaf.layer_dims)
    values = jnp.moveaxis(values, leaf.layer_dims, range(lead)).astype(jnp.float32)
    one = values.reshape(-1, *values.shape[lead:])
    wires = lax.map(lambda x: quantize(x, format=format).buffer, one)
    return wires.reshape(*values.shape[:lead], -1)


def from_wires(wires: jax.Array, leaf: DenseLeaf, format: WireFormat) -> jax.Array:
    """Return the leaf that wires encode, in float32."""
    lead = len(leaf.layer_dims)
    rest = [d for d in range(len(leaf.shape)) if d not in leaf.layer_dims]
    wire = Wire(jnp.asarray(wires), layer_size(leaf), format)
    values = dequantize(wire, shape=leaf.sizes(rest), dtype=jnp.float32)
    return jnp.moveaxis(values, range(lead), leaf.layer_dims)
