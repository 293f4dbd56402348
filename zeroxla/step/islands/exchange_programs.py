"""The programs of an exchange: they make bytes of differences, and a mean of bytes.

An exchange has two moves, and its bytes do not grow with the number of islands. First each island
sends every other one that one's part of its differences (a reduce-scatter); each averages its part.
Then each sends its mean to the others (an all-gather). All islands decode the same bytes of the
same mean, so their outer parameters stay equal bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zeroxla.config.outer import Outer
from zeroxla.config.wire_format import WireFormat
from zeroxla.offload.memory_kinds import to_device
from zeroxla.wire.quantize import Wire, dequantize, quantize


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExchangePrograms:
    """The programs of one fragment between a number of islands.

    Attributes:
      outer: the options.
      mesh: the island's mesh.
      size: the number of elements of a device's row.
      num: the number of islands.
    """

    outer: Outer
    mesh: Mesh
    size: int
    num: int

    @property
    def part_size(self) -> int:
        """The number of elements that an island averages, padding included."""
        block = 1 if self.outer.wire is None else self.outer.wire.block
        return -(-self.size // (self.num * block)) * block

    @property
    def part_bytes(self) -> int:
        """The bytes of such a part."""
        wire = self.outer.wire
        return 4 * self.part_size if wire is None else wire.num_bytes(self.part_size)

    @functools.cached_property
    def encode(self) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
        """(difference, float32 [devices, size]; error) -> the bytes for each island, uint8
        [devices, islands, bytes], and the next error."""

        def local(difference: jax.Array, error: Any) -> tuple[jax.Array, Any]:
            row = difference[0] if error is None else difference[0] + error[0]
            parts = self._padded(row).reshape(self.num, -1)
            data = encoded(parts, self.outer.wire)
            if error is None:
                return data[None], None
            lost = parts - decoded(data, self.outer.wire, self.part_size)
            return data[None], _finite(lost).reshape(1, -1)[:, : self.size]

        return self._map(local, 2)

    @functools.cached_property
    def average(self) -> Callable[..., tuple[jax.Array, jax.Array | None]]:
        """(bytes of the islands' parts, uint8 [devices, islands, bytes]; the error of the means
        before, float32 [devices, size]; the number of this island's part; the islands' weights,
        float32 [islands]) -> the bytes of the mean, uint8 [devices, bytes], and the next error.

        A part that is not finite has no weight: an island that diverges takes no other with it.
        """

        def local(
            data: jax.Array, error: Any, index: jax.Array, weights: jax.Array
        ) -> tuple[jax.Array, Any]:
            parts = decoded(data[0], self.outer.wire, self.part_size)
            weights = jnp.where(jnp.isfinite(parts).all(1), weights, 0)
            shares = weights / jnp.maximum(weights.sum(), 1)
            mean = jnp.einsum("i,in->n", shares, _finite(parts), precision="highest")
            if error is None:
                return encoded(mean[None], self.outer.wire), None
            at = index * self.part_size
            padded = self._padded(error[0])
            mean = mean + lax.dynamic_slice(padded, (at,), (self.part_size,))
            sent = encoded(mean[None], self.outer.wire)
            lost = mean - decoded(sent, self.outer.wire, self.part_size)[0]
            padded = lax.dynamic_update_slice(padded, lost, (at,))
            return sent, padded[None, : self.size]

        return self._map(local, 2, whole=2)

    @functools.cached_property
    def decode(self) -> Callable[[jax.Array], jax.Array]:
        """(bytes of the means of all parts, uint8 [devices, islands, bytes]) -> the mean, float32
        [devices, size]."""

        def local(data: jax.Array) -> jax.Array:
            mean = decoded(data[0], self.outer.wire, self.part_size)
            return mean.reshape(1, -1)[:, : self.size]

        return self._map(local, 1)

    def _padded(self, row: jax.Array) -> jax.Array:
        """Return a row with zeros behind it, so that it divides into parts."""
        return jnp.pad(row, (0, self.num * self.part_size - self.size))

    def _map(self, local: Callable[..., Any], num_rows: int, whole: int = 0) -> Callable[..., Any]:
        """Compile a function of arrays split by rows, and others that all devices have whole."""
        rows = PartitionSpec(self.mesh.axis_names)

        def run(*arrays: Any) -> Any:
            here = jax.tree.map(to_device, arrays)
            ins = [jax.tree.map(lambda _: rows, x) for x in here[:num_rows]]
            ins += [PartitionSpec()] * whole
            mapped = jax.shard_map(
                local, mesh=self.mesh, in_specs=tuple(ins), out_specs=rows, check_vma=False
            )
            return mapped(*here)

        return jax.jit(run)


def _finite(x: jax.Array) -> jax.Array:
    """Return an array with zeros in the place of what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def encoded(x: jax.Array, format: WireFormat | None) -> jax.Array:
    """Return the bytes of float32 arrays [N, n], uint8 [N, bytes]."""
    if format is None:
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)
    return quantize(x, format, lead=1).buffer


def decoded(data: jax.Array, format: WireFormat | None, size: int) -> jax.Array:
    """Return the float32 arrays [N, size] of bytes uint8 [N, bytes]."""
    if format is None:
        return lax.bitcast_convert_type(data.reshape(len(data), size, 4), jnp.float32)
    return dequantize(Wire(data, size, format), (size,))
