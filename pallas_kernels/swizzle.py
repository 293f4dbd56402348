"""The order in which DeepSpeed sends the parts of a gradient (`swizzled_quantize.cu`).

In a tensor laid out by rank, partition p = node x devices + device is for rank p. To travel over
`device` first, it is written at (p % devices) x nodes + p / devices. So the partitions for device 0
of all nodes come first, then the partitions for device 1 of all nodes, and so on. If partitions are
cut into chunks, the first chunks of all partitions come first. They can travel while the second
chunks are quantized.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swizzle:
    """The place to which each chunk of each partition is written.

    Attributes:
      nodes: number of nodes in the mesh.
      devices: number of devices in a node.
      chunks: number of chunks in a partition.
    """

    nodes: int
    devices: int
    chunks: int

    @property
    def num_wires(self) -> int:
        """Number of chunks in all partitions; each chunk is one wire."""
        return self.nodes * self.devices * self.chunks

    def target(self, wire):
        """Return the place of wire number `partition x chunks + chunk`.

        Args:
          wire: an integer, traced or not, or an array of integers.
        """
        partition, chunk = wire // self.chunks, wire % self.chunks
        place = (partition % self.devices) * self.nodes + partition // self.devices
        return chunk * (self.nodes * self.devices) + place

    def sources(self) -> np.ndarray:
        """Return the wire that goes to each place: int64[num_wires]."""
        return np.argsort(self.target(np.arange(self.num_wires)))
