"""`Offload`: which parts of the state live in the host's memory or on its disk."""

from __future__ import annotations

import dataclasses
import numbers
import os
from typing import Literal

from zeroxla.config.values import whole_number

PLACES = ("none", "host", "disk")
UPDATES = ("device", "host")
PINNED = "pinned_host"
"""JAX's name for the host's pinned memory."""
DISK = "disk"
"""The name of a place that JAX does not know as a memory: the host's disk."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Where the parts of the state live that a device does not need all the time.

    Shards in host memory come to the device when they are used. Parameters come unit by unit, as
    the fetch plan gathers them. The optimizer's state and the parameters' master come in sub-groups
    when the update reads them, and go back when it has written them.

    On disk each step has one file a process, twice as large as its content: it never writes over
    the state before. Results stay the same bit for bit; where the host updates, to rounding.

    Source: ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; DeepSpeed's
    `offload_optimizer` and `offload_param`.
    """

    optimizer: Literal["none", "host", "disk"] = "none"
    """Where the optimizer's state of split leaves lives. (offload_optimizer.device)"""

    params: Literal["none", "host", "disk"] = "none"
    """Where the float32 master of split leaves lives. A frozen base that is stored as wires lives
    there too. (offload_param.device)"""

    secondary: Literal["none", "host"] = "none"
    """Where hpZ's secondary shards live from forward to backward. They are no part of the state. In
    host memory they cross its link twice in a step, which saves one crossing of the network."""

    activations: Literal["none", "host"] = "none"
    """Whether values that backward reads may wait in the host's memory, where that is faster than
    computing them again; needs `ZeroConfig(memory=)`."""

    ratio: float = 1.0
    """Approximate share of the elements that is offloaded. Whole arrays are taken in the state's
    order (Adam's first moments come before its second); the rest stays on the devices.
    (offload_optimizer.ratio)"""

    pin: bool = True
    """Whether host memory is pinned, so that copies run beside computation. False is refused:
    compiled programs keep their host arrays in pinned memory. (pin_memory)"""

    update: Literal["device", "host"] = "device"
    """Where arrays in host memory are updated. "device": they come to the device for it. "host":
    gradients go to the host instead; results are then equal to rounding. (DeepSpeed's CPUAdam)"""

    sub_group: int = 100_000_000
    """Largest number of elements per device and buffer that the update has on the device at a time,
    or on the way to the host if that updates. A larger leaf is a sub-group of its own.
    (sub_group_size)"""

    buffers: int = 2
    """Number of sub-groups that are on the device or on the way at a time. With 2, one comes while
    the other is updated. (buffer_count)"""

    path: str | None = None
    """Folder on a disk of each host, in which each step has its own file. It is made if missing.
    Steps and runs may share it. (nvme_path)"""

    def __post_init__(self) -> None:
        for name in ("optimizer", "params"):
            if getattr(self, name) not in PLACES:
                raise ValueError(
                    f"Offload({name}={getattr(self, name)!r}) is not a place; use one of {PLACES}"
                )
        if self.secondary not in ("none", "host"):
            raise ValueError(
                f"Offload(secondary={self.secondary!r}) is not a place for secondary shards, which "
                "live for a part of a step; use 'none' or 'host'"
            )
        if self.activations not in ("none", "host"):
            raise ValueError(
                f"Offload(activations={self.activations!r}) is not a place for activations, which "
                "live for a part of a step; use 'none' or 'host'"
            )
        if self.update not in UPDATES:
            raise ValueError(
                f"Offload(update={self.update!r}) is not a place of the update; use one of "
                f"{UPDATES}"
            )
        if self.update == "host" and (self.optimizer != "host" or self.params == DISK):
            raise ValueError(
                f"Offload(update='host', optimizer={self.optimizer!r}, params={self.params!r}): "
                "the host updates what is in its memory; use optimizer='host' with params='none' "
                "or 'host', or update='device'"
            )
        if self.pin is not True:
            raise ValueError(
                f"Offload(pin={self.pin!r}): compiled programs keep what is on the host in pinned "
                "memory (to JAX's traces unpinned memory is the device's, and what is there would "
                "come back on the devices); leave pin=True"
            )
        if self.on_disk and self.path is None:
            name = "params" if self.params == DISK else "optimizer"
            raise ValueError(
                f"Offload({name}='disk') needs a folder: pass path=, on a fast disk of each host"
            )
        if self.path is not None:
            object.__setattr__(self, "path", os.fspath(self.path))
        ratio = self.ratio
        if not isinstance(ratio, numbers.Real) or not 0 <= ratio <= 1:
            raise ValueError(f"Offload(ratio={ratio!r}) must be a share, 0 to 1")
        for name in ("sub_group", "buffers"):
            value = whole_number(f"Offload {name}", getattr(self, name), 1)
            object.__setattr__(self, name, value)

    @property
    def is_used(self) -> bool:
        """Whether any part of the state is offloaded."""
        return (self.optimizer, self.params) != ("none", "none") and self.ratio > 0

    @property
    def on_disk(self) -> bool:
        """Whether any part of the state is on disk."""
        return DISK in (self.optimizer, self.params) and self.ratio > 0


def memory_of(place: str) -> str | None:
    """Return the value of `Placement.memory` for a place of `Offload`."""
    return {"none": None, "host": PINNED, DISK: DISK}[place]
