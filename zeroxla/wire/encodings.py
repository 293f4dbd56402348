"""Encodings: the form in which a gather moves a leaf, as bits of floats or as bytes of wires."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.wire.bundles import Parcel
from zeroxla.wire.hops import as_bits, from_bits
from zeroxla.wire.quantize import Backend
from zeroxla.wire.quantize_jit import dequantize, quantize
from zeroxla.wire.wire import Wire


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The form in which equal parts of a leaf, cut along its split dim, travel.

    A quantized leaf has one wire for each part. If loops slice the leaf, each layer of each part
    has a wire, uint8[*layers, parts, bytes], so that a loop finds the wires of a layer by an index.

    Attributes:
      shape: the shape of one part, its dims in the order of the leaf's.
      split_dim: the dim along which the parts follow each other.
      layer_dims: the dims along which loops slice the leaf.
      format: the format of the wires; None if the parts travel as floats.
      dtype: the wire dtype of the floats.
      backend: the quantizer's backend; see `quantize`.
    """

    shape: tuple[int, ...]
    split_dim: int
    layer_dims: tuple[int, ...]
    format: WireFormat | None
    dtype: jnp.dtype
    backend: Backend | None = None

    @property
    def parcel(self) -> Parcel:
        """The shape of one part, as a collective sees it."""
        if self.format is None:
            return Parcel(shape=self.shape, dim=self.split_dim)
        layers = [self.shape[d] for d in self.layer_dims]
        num_bytes = self.format.num_bytes(math.prod(self.shape) // math.prod(layers))
        return Parcel(shape=(*layers, 1, num_bytes), dim=len(layers))

    def encode(self, part: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return one part as it travels.

        Args:
          part: the part, floating, its dims in the order of the leaf's.
          key: a PRNG key; used only if the format rounds stochastically.
        """
        if self.format is None:
            return as_bits(part.astype(self.dtype))
        lead = len(self.layer_dims)
        part = jnp.moveaxis(part, self.layer_dims, range(lead))
        key = key_for(self.format, key)
        wire = quantize(part, format=self.format, lead=lead, key=key, backend=self.backend)
        return jnp.expand_dims(wire.buffer, lead)

    def decode(self, parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Turn any number of parts as they travel back into one array of `dtype`, whose dims are in
        the order of the leaf's."""
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
