"""Encodings: a leaf, or a part of it, as what a gather moves: bits of floats or bytes of wires."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.wire.bundles import Parcel
from zeroxla.wire.hops import as_bits, from_bits
from zeroxla.wire.quantize import Backend, Wire
from zeroxla.wire.quantize_jit import dequantize, quantize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How equal parts of a leaf, cut along its split dim, travel.

    A quantized leaf has one wire for each part, or, if loops slice it, for each layer of each part:
    uint8[*layers, parts, bytes]. So a loop finds a layer's wires by an index.

    Attributes:
      shape: of one part, in leaf layout.
      split_dim: along which the parts follow each other.
      layer_dims: along which loops slice the leaf.
      format: of the wires; None if the parts travel as floats.
      dtype: of the floats.
      backend: of the quantizer.
    """

    shape: tuple[int, ...]
    split_dim: int
    layer_dims: tuple[int, ...]
    format: WireFormat | None
    dtype: jnp.dtype
    backend: Backend | None = None

    @property
    def parcel(self) -> Parcel:
        """One part, as a collective sees it."""
        if self.format is None:
            return Parcel(shape=self.shape, dim=self.split_dim)
        layers = [self.shape[d] for d in self.layer_dims]
        num_bytes = self.format.num_bytes(math.prod(self.shape) // math.prod(layers))
        return Parcel(shape=(*layers, 1, num_bytes), dim=len(layers))

    def encode(self, part: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return what travels of one part; `key` is used where the format rounds stochastically."""
        if self.format is None:
            return as_bits(part.astype(self.dtype))
        lead = len(self.layer_dims)
        part = jnp.moveaxis(part, self.layer_dims, range(lead))
        key = key_for(self.format, key)
        wire = quantize(part, format=self.format, lead=lead, key=key, backend=self.backend)
        return jnp.expand_dims(wire.buffer, lead)

    def decode(self, parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Return any number of parts as one array in leaf layout."""
        if self.format is None:
            return from_bits(parts, self.dtype).astype(dtype)
        lead = len(self.layer_dims)
        rest = [d for d in range(len(self.shape)) if d not in self.layer_dims]
        shape = [self.shape[d] for d in rest]
        wire = Wire(parts, math.prod(shape), self.format)
        x = dequantize(
            wire, shape=tuple(shape), dtype=dtype, backend=self.backend
        )  # [*layers, parts, *rest]
        x = jnp.moveaxis(x, lead, lead + rest.index(self.split_dim))
        whole = [-1 if d == self.split_dim else self.shape[d] for d in rest]
        x = x.reshape(*parts.shape[:lead], *whole)
        return jnp.moveaxis(x, range(lead), self.layer_dims)
