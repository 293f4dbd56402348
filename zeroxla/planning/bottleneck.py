"""What limits a planned step: the resource that is in use longest, and what would change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.planning.lanes import COMPUTE, TimeLine, on_links
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE, Target

PRODUCTS = "products"
"""The device's arithmetic: matrix products, which reach a share of the peak (the efficiency)."""
MEMORY = "memory"
"""The bandwidth of the device's memory: everything but products, and the optimizer's update."""

NAMES: Mapping[str, str] = {
    PRODUCTS: "matrix products of the device",
    MEMORY: "the bandwidth of the device's memory",
    NODE: "the link between nodes",
    DEVICE: "the links between the devices of a node",
    PIPE: "the link between stages",
    HOST: "the link between a device and its host's memory",
    HOST_UPDATE: "the host's update of the state",
    DISK: "the host's disk",
}
"""What people call each resource."""

REMEDIES: Mapping[str, str] = {
    PRODUCTS: "compute less again in backward (remat), or take more or faster devices",
    MEMORY: "keep and read fewer activations: fewer of them in float32, kernels that fuse; or take "
    "devices with faster memory",
    NODE: 'send fewer bytes over it (quantized wires: ZeRO++; inter_node_gather="step" and '
    'inter_node_reduce="step" with accumulation), compute more for each byte (a larger batch of '
    "each device), or take a faster link",
    DEVICE: "send fewer bytes over them (quantized wires: ZeRO++), compute more for each byte (a "
    "larger batch of each device; shorter axes that split the work on a row), or take faster links",
    PIPE: "send fewer bytes over it (fewer stages), or take a faster link",
    HOST: 'move less of the state (a smaller Offload.ratio, or update="host", which moves '
    "gradients instead of moments), or take a faster link",
    HOST_UPDATE: 'let the devices update (Offload(update="device")), offload less, or take a host '
    "with faster memory",
    DISK: "keep the state in the host's memory instead of on its disk, or take a faster disk",
}
"""What would make a step that each resource limits shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """The resource that limits a step.

    Attributes:
      resource: `PRODUCTS` or `MEMORY` of the device, a mesh axis for its link, or one of the host's
        lanes in `target.py`.
      seconds: the seconds of the step for which it is in use.
      share: these seconds over those of the step.
      faster_s: the seconds of a step in which this resource is twice as fast, and nothing else.
    """

    resource: str
    seconds: float
    share: float
    faster_s: float

    @property
    def name(self) -> str:
        """The resource, as people call it."""
        return NAMES[self.resource]

    @property
    def remedy(self) -> str:
        """What would make the step shorter."""
        return REMEDIES[self.resource]

    def __str__(self) -> str:
        """Say in two sentences what limits the step and what would change it."""
        return (
            f"What limits it: {self.name}, in use for {self.seconds:.3g} s ({self.share:.0%}); "
            f"twice as fast, a step would take {self.faster_s:.3g} s. To change it: {self.remedy}."
        )


def longest(time: TimeLine, shared: Mapping[str, str] | None = None) -> tuple[str, float]:
    """Return the resource that is in use longest in a step, and its seconds.

    The device's computation counts as one, as it does one thing at a time. If it takes longest, the
    part of it that takes longer is named: products or memory. Axes that share a link count as one,
    as `Target.shared_links` says.
    """
    busy_s = on_links(time.busy_s, shared or {})
    lane, seconds = max(busy_s.items(), key=lambda item: item[1])
    if lane != COMPUTE:
        return lane, seconds
    parts = {PRODUCTS: seconds - time.memory_s, MEMORY: time.memory_s}
    return max(parts.items(), key=lambda item: item[1])


def twice_as_fast(target: Target, resource: str) -> Target:
    """Return a target in which one resource is twice as fast."""
    device, links = target.device, dict(target.links)
    if resource == PRODUCTS:
        rates = {dtype: 2 * rate for dtype, rate in device.flops_per_s.items()}
        device = dataclasses.replace(device, flops_per_s=rates)
    elif resource == MEMORY:
        device = dataclasses.replace(device, bytes_per_s=2 * device.bytes_per_s)
    elif resource == HOST_UPDATE:
        device = dataclasses.replace(device, host_bytes_per_s=2 * device.host_bytes_per_s)
    else:
        for axis in (resource, *(a for a, own in target.shared_links.items() if own == resource)):
            link = links[axis]
            links[axis] = dataclasses.replace(
                link, bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2
            )
    return dataclasses.replace(target, device=device, links=links)
