"""`Offload`: which parts of the state live in the host's memory, or on its disk."""

from __future__ import annotations

import dataclasses
import numbers
import os
from typing import Literal

from zeroxla.config.values import whole_number

PLACES = ("none", "host", "disk")
UPDATES = ("device", "host")
PINNED = "pinned_host"
"""JAX's name of the host's memory."""
DISK = "disk"
"""The place that is no memory of JAX's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Where the state lives that a device does not need all the time.

    A device's shards in host memory come to it when they are used: parameters unit by unit, as the
    fetch plan gathers them; the optimizer's state, and the parameters' master, in sub-groups as the
    update reads them, and go back when it has written them. On disk each process has one file, of
    twice the bytes of what is in it: a step never writes over the state before it. The step
    computes the same, bit for bit; to rounding where the host updates.

    Source: ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857; DeepSpeed's
    `offload_optimizer` and `offload_param`.
    """

    optimizer: Literal["none", "host", "disk"] = "none"
    """Where the optimizer's state of split leaves lives. (offload_optimizer.device)"""

    params: Literal["none", "host", "disk"] = "none"
    """Where the float32 master of split leaves lives, or a frozen base stored as wires.
    (offload_param.device)"""

    secondary: Literal["none", "host"] = "none"
    """Where hpZ's secondary shards live from forward to backward; no part of the state. In host
    memory they cross its link twice in a step instead of the network once more."""

    ratio: float = 1.0
    """About which share of the elements is offloaded, array by array in the state's order (Adam's
    first moments come before its second); the rest stays on the devices.
    (offload_optimizer.ratio)"""

    pin: bool = True
    """Host memory is pinned, so that copies run beside computation. False is refused: what
    compiled programs keep on the host is. (pin_memory)"""

    update: Literal["device", "host"] = "device"
    """Where the update of what is in host memory is computed: on the device, to which its state
    comes for it, or on the host, to which gradients go. The host computes the same to rounding.
    (DeepSpeed's CPUAdam)"""

    sub_group: int = 100_000_000
    """Most elements, of one device, that the update has on the device (updating on the host: on the
    way) at a time, for each buffer; a leaf larger than that is a sub-group of its own.
    (sub_group_size)"""

    buffers: int = 2
    """Sub-groups that are on the device, or on the way, at a time: with 2, one comes while one is
    updated. (buffer_count)"""

    path: str | None = None
    """The folder of the file, on a disk of each host; made if missing. (nvme_path)"""

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
        """Whether anything of the state is offloaded."""
        return (self.optimizer, self.params) != ("none", "none") and self.ratio > 0

    @property
    def on_disk(self) -> bool:
        """Whether anything is on disk."""
        return DISK in (self.optimizer, self.params) and self.ratio > 0


def memory_of(place: str) -> str | None:
    """Return what a placement calls a place."""
    return {"none": None, "host": PINNED, DISK: DISK}[place]
