"""The order in which DeepSpeed sends the parts of a gradient (`swizzled_quantize.cu`).

In a tensor laid out by rank, partition p = node x devices + device is for rank p. To travel over
`device` first, it is written at (p % devices) x nodes + p / devices: what all nodes' device 0 will
hold, then what all nodes' device 1 will hold, ... Partitions cut into chunks come chunk by chunk,
so that everybody's first chunk can travel while the second is quantized.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swizzle:
    """Where each chunk of each partition goes.

    Attributes:
      nodes: of the mesh.
      devices: of a node.
      chunks: of a partition.
    """

    nodes: int
    devices: int
    chunks: int

    @property
    def num_wires(self) -> int:
        """Chunks of all partitions."""
        return self.nodes * self.devices * self.chunks

    def target(self, wire):
        """Return where wire `partition x chunks + chunk` goes; `wire` is an integer, traced or not,
        or an array of them."""
        partition, chunk = wire // self.chunks, wire % self.chunks
        place = (partition % self.devices) * self.nodes + partition // self.devices
        return chunk * (self.nodes * self.devices) + place

    def sources(self) -> np.ndarray:
        """Return the wire that goes to each place: int64[num_wires]."""
        return np.argsort(self.target(np.arange(self.num_wires)))
