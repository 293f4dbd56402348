"""Options of several commands: which state lives in the host's memory, or on its disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zeroxla.config.offload import Offload

_PREFIX = "offload_"


@dataclass(frozen=True, kw_only=True)
class PlannedOffload:
    """State that lives in the host's memory, or on its disk. Default: none of it; or as --deepspeed
    has it."""

    offload_optimizer: Literal["none", "host", "disk"] | None = None
    """Place of the optimizer's state between updates; none means the devices."""
    offload_params: Literal["none", "host", "disk"] | None = None
    """Place of the parameters' float32 master copy; none means the devices."""
    offload_secondary: Literal["none", "host"] | None = None
    """Place of ZeRO++'s secondary shards from forward to backward; none means the devices."""
    offload_activations: Literal["none", "host"] | None = None
    """Place of values from forward to backward where that is faster than computing them again;
    host needs --device-memory."""
    offload_update: Literal["device", "host"] | None = None
    """Processor that updates the state on the host; host needs --offload-optimizer host. Default:
    device."""
    offload_ratio: float | None = None
    """Share of the offloaded state that goes there, about; the rest stays on the devices. Default:
    1."""
    offload_sub_group: int | None = None
    """Largest number of elements per device that the update has on the device at a time. Default:
    100000000."""
    offload_buffers: int | None = None
    """Number of such sub-groups that are on the device or on the way at a time. Default: 2."""

    @property
    def on_disk(self) -> bool:
        """Whether anything is on disk."""
        return "disk" in (self.offload_optimizer, self.offload_params)

    def changed(self, offload: Offload, path: Path | None) -> Offload:
        """Return the value of `ZeroConfig.offload`.

        Args:
          offload: the value that these options change.
          path: the folder on disk; None keeps the folder of `offload`.
        """
        given = {
            name.removeprefix(_PREFIX): value
            for name, value in vars(self).items()
            if value is not None
        }
        path = given.pop("path", path)
        return dataclasses.replace(offload, **given, path=offload.path if path is None else path)

    def check(self, zero: str, pipe: int, *, hpz: bool = False) -> None:
        """Check these options against each other and against others.

        Args:
          zero: the option --zero.
          pipe: the option --pipe.
          hpz: whether --hpz-size asks for secondary shards.

        Raises:
          ValueError: they do not go together.
        """
        on_host = self.offload_optimizer == "host" and not self.on_disk
        if self.offload_update == "host" and not on_host:
            raise ValueError(
                f"--offload-update host with --offload-optimizer {self.offload_optimizer or 'none'}"
                f" and --offload-params {self.offload_params or 'none'}: the host updates what is "
                "in its memory; use --offload-optimizer host and parameters not on disk, or "
                "--offload-update device"
            )
        if self.offload_params == "disk" and pipe > 1:
            raise ValueError(
                f"--offload-params disk with --pipe {pipe}: stages exchange leaves once a step, "
                "all at once; use --offload-params host, or --pipe 1"
            )
        wanted = self.offload_secondary not in (None, "none")
        if wanted and not hpz and zero not in ("zeropp", "zeropp_hq"):
            raise ValueError(
                f"--offload-secondary {self.offload_secondary} with --zero {zero}, which keeps no "
                "secondary shards apart from the state; use --zero zeropp or zeropp_hq, or "
                "--hpz-size node"
            )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(PlannedOffload):
    """State that lives in the host's memory, or on its disk. Default: none of it; or as --deepspeed
    has it."""

    offload_path: Path | None = None
    """Folder on a fast disk of each host, for state on disk. The file in it serves the run while it
    runs; checkpoints are what remains."""

    def check(self, zero: str, pipe: int, *, hpz: bool = False) -> None:
        # A path without state on disk is no error: a resumed run may have been given one before.
        if self.on_disk and self.offload_path is None:
            raise ValueError(
                f"--offload-optimizer {self.offload_optimizer or 'none'} and --offload-params "
                f"{self.offload_params or 'none'} without --offload-path; name a folder on a fast "
                "disk of each host"
            )
        super().check(zero, pipe, hpz=hpz)
