"""The hops of a reduce: floats are summed in one, wires in one or more.

Shapes: L devices in a hop, R rows (shards) that a device still holds, n elements in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.config.wire_format import WireFormat, key_for
from zeroxla.program.random_keys import fold_in
from zeroxla.wire.exchange import exchange
from zeroxla.wire.hops import as_bits, from_bits
from zeroxla.wire.quantize import Backend
from zeroxla.wire.quantize_jit import dequant_reduce, dequant_sum, quantize
from zeroxla.wire.wire import Wire

Keys = Sequence[jax.Array | None]
"""A key for each bundle; None if no format rounds stochastically."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReduceHop:
    """One hop of a reduce over more than one device.

    Attributes:
      axis: the mesh axis, or several, the outermost first.
      length: length of the axis.
      format: the format in which gradients travel; None if they travel as floats.
    """

    axis: str | tuple[str, ...]
    length: int
    format: WireFormat | None

    def sum_floats(self, x: jax.Array, dim: int, dtype: jnp.dtype) -> jax.Array:
        """Make the hop with floats: return the float32 sum of this device's slice along `dim`.

        16-bit slices travel by all_to_all and are summed here in float32. Each value is then
        rounded once in a hop, where a ring would round it at every step.

        Args:
          x: floats, whose length along `dim` is a multiple of the hop's.
          dim: the dim that the hop splits.
          dtype: the wire dtype.
        """
        x = x.astype(dtype)
        if dtype == jnp.float32:
            return lax.psum_scatter(x, self.axis, scatter_dimension=dim, tiled=True)
        slices = x.reshape(
            *x.shape[:dim], self.length, x.shape[dim] // self.length, *x.shape[dim + 1 :]
        )
        received = lax.all_to_all(
            as_bits(slices), self.axis, split_axis=dim, concat_axis=dim, tiled=True
        )
        return jnp.sum(from_bits(received, dtype), axis=dim, dtype=jnp.float32)


def last_with_format(hops: Sequence[ReduceHop]) -> int:
    """Return the index of the last hop that sends wires."""
    return max(i for i, hop in enumerate(hops) if hop.format is not None)


def wires_of_last_hop(
    rows: list[jax.Array],
    hops: Sequence[ReduceHop],
    keys: Keys,
    dtype: jnp.dtype,
    backend: Backend | None,
) -> list[Wire]:
    """Make all hops before the last one that sends wires, and the wires of that one.

    Args:
      rows: float[R, n] for each bundle, with the same R and its own n.
      hops: all hops of the reduce.
      keys: a key for each bundle.
      dtype: wire dtype on hops without a format.
      backend: the quantizer's backend.
    """
    before: ReduceHop | None = None  # the hop that `wires` are made for
    wires: list[Wire] = []
    for i, hop in enumerate(hops[: last_with_format(hops) + 1]):
        if hop.format is None:
            rows = [hop.sum_floats(x, 0, dtype) for x in rows]
            continue
        options = {"format": hop.format, "backend": backend}
        mine = [key_for(hop.format, fold_in(key, i)) for key in keys]
        if before is None:
            wires = [quantize(x, lead=1, key=k, **options) for x, k in zip(rows, mine, strict=True)]
        else:
            arrived = exchange(wires, before.axis, before.length)
            wires = [
                dequant_reduce(w, key=k, **options) for w, k in zip(arrived, mine, strict=True)
            ]
        before = hop
    return wires


def sum_wires(
    wires: Sequence[Wire], hops: Sequence[ReduceHop], dtype: jnp.dtype, backend: Backend | None
) -> list[jax.Array]:
    """Make the last hop that sends wires, and all hops after it.

    Args:
      wires: [R] wires for each bundle, from `wires_of_last_hop`.
      hops, dtype, backend: as there.

    Returns:
      The rows that stay here: float32[rows, n] for each bundle.
    """
    last = last_with_format(hops)
    arrived = exchange(wires, hops[last].axis, hops[last].length)
    rows = [dequant_sum(w, shape=(w.size,), backend=backend) for w in arrived]
    for hop in hops[last + 1 :]:
        rows = [hop.sum_floats(x, 0, dtype) for x in rows]
    return rows
