"""The costs of layers, and the time that they take on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """The costs of one layer. None means that a cost is not known.

    Attributes:
      name: the layer's name in reports.
      kind: the name of the layer's class, which "type:REGEX" searches.
      parameters: the number of its parameters.
      flops: the FLOPs of its compiled forward and backward.
      bytes: the bytes that the compiled forward and backward read and write.
      seconds: the measured time of forward and backward.
      bytes_after: the bytes of the arrays that pass from this layer to those after it, for one
        micro-batch.
    """

    name: str
    kind: str
    parameters: int
    flops: float | None = None
    bytes: float | None = None
    seconds: float | None = None
    bytes_after: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The roofline of one device: a layer takes as long as the slower of arithmetic and memory.

    Attributes:
      flops_per_s: FLOPs per second in the dtype in which the layers compute.
      bytes_per_s: bytes per second of the device's main memory.
    """

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self):
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0):
            raise ValueError(
                f"a machine of {self.flops_per_s} FLOP/s and {self.bytes_per_s} bytes/s computes "
                "nothing; give both figures of one device, above 0"
            )


def seconds_of(layers: Sequence[LayerCost], machine: Machine | None) -> list[float]:
    """Return the seconds of each layer: all measured, or all computed from FLOPs and bytes.

    The two are never mixed, because they are not on one scale.

    Args:
      layers: the layers.
      machine: the device to compute times for; not needed for measured layers.

    Raises:
      ValueError: some layers were measured and others not, or figures are missing.
    """
    measured = [layer.seconds for layer in layers if layer.seconds is not None]
    if len(measured) == len(layers):
        return measured
    if measured:
        names = ", ".join(layer.name for layer in layers if layer.seconds is None)
        raise ValueError(
            f"partition='profile' has the seconds of {len(measured)} of {len(layers)} layers, not "
            f"of {names}; measure all of them, or none"
        )
    times = []
    for layer in layers:
        if layer.flops is None or layer.bytes is None:
            raise ValueError(
                f"partition='profile' needs the seconds, or the flops and bytes, of every layer; "
                f"{layer.name} has flops={layer.flops}, bytes={layer.bytes}"
            )
        if machine is None:
            raise ValueError(
                "partition='profile' turns flops and bytes into a time by a machine's figures; "
                "give machine=Machine(flops_per_s=..., bytes_per_s=...), or measured seconds"
            )
        times.append(max(layer.flops / machine.flops_per_s, layer.bytes / machine.bytes_per_s))
    return times
