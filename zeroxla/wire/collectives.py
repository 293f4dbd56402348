"""The collectives of one training setup: gathers, reduces, and small sums.

A flat collective over both mesh axes moves 4.5x to 7x the bytes between hosts; there is none here:
each passes one axis at a time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.offload.disk.desk import Desk
from zeroxla.wire.gather import Gathers
from zeroxla.wire.hops import Hops
from zeroxla.wire.quantize import Backend
from zeroxla.wire.reduce import Reduces


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """The collectives of one training setup; every method runs inside `shard_map`.

    Attributes:
      gathers: of leaves.
      reduces: of gradients.
      firm_ties: whether the order of collectives must be one of data, see `prefetch.tie`.
    """

    gathers: Gathers
    reduces: Reduces
    firm_ties: bool = False
    stages: int = 1

    @classmethod
    def make(
        cls,
        *,
        nodes: int,
        devices: int,
        compute_dtype: str = "float32",
        wire_dtype: str | None = None,
        reduce_dtype: str = "float32",
        hpz_size: int | None = None,
        stops_at_node: bool = False,
        backend: Backend | None = None,
        firm_ties: bool = False,
        secondary_on_host: bool = False,
        desk: Desk | None = None,
    ) -> Collectives:
        """Make the collectives of a mesh.

        Args:
          nodes: length of the axis `node`.
          devices: length of the axis `device`.
          compute_dtype: of gathered leaves.
          wire_dtype: in which leaves travel that are not quantized; compute_dtype if None.
          reduce_dtype: likewise of gradients.
          hpz_size: devices that share a secondary shard; `devices` if None.
          stops_at_node: see `Reduces`.
          backend: of the quantizer; None has it chosen.
          firm_ties: see the attribute.
          secondary_on_host: secondary shards are kept in the host's memory.
          desk: that reads shards on disk.
        """
        hops = Hops(nodes=nodes, devices=devices, hpz_size=hpz_size or devices)
        return cls(
            gathers=Gathers(
                hops=hops,
                wire_dtype=jnp.dtype(wire_dtype or compute_dtype),
                compute_dtype=jnp.dtype(compute_dtype),
                backend=backend,
                secondary_on_host=secondary_on_host,
                desk=desk,
            ),
            reduces=Reduces(
                nodes=nodes,
                devices=devices,
                dtype=jnp.dtype(reduce_dtype),
                stops_at_node=stops_at_node,
                backend=backend,
            ),
            firm_ties=firm_ties,
        )

    @property
    def hops(self) -> Hops:
        return self.gathers.hops

    @property
    def world(self) -> int:
        return self.hops.world

    @property
    def num_devices(self) -> int:
        """Of all stages."""
        return self.world * self.stages

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of gathered leaves."""
        return self.gathers.compute_dtype

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum a small vector over all devices, hop by hop; not for what grows with the model."""
        if not x.size:
            return x
        lengths = ((DEVICE, self.hops.devices), (NODE, self.hops.nodes), (PIPE, self.stages))
        for axis, length in lengths:
            if length > 1:
                x = lax.psum(x, axis)
        return x

    def rank(self) -> jax.Array:
        """This device's data-parallel index, node * devices per node + device: int32."""
        return lax.axis_index(NODE) * self.hops.devices + lax.axis_index(DEVICE)
