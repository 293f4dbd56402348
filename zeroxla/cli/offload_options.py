"""Options of commands: what lives in the host's memory, or on its disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zeroxla.config.offload import Offload


@dataclass(frozen=True, kw_only=True)
class PlannedOffload:
    """State in the host's memory, or on its disk."""

    offload_optimizer: Literal["none", "host", "disk"] = "none"
    """Where the optimizer's state lives between updates."""
    offload_params: Literal["none", "host", "disk"] = "none"
    """Where the float32 master of the parameters lives."""
    offload_secondary: Literal["none", "host"] = "none"
    """Where the secondary shards of ZeRO++ live from forward to backward."""
    offload_update: Literal["device", "host"] = "device"
    """Where the update of what is on the host is computed; host needs --offload-optimizer host."""
    offload_ratio: float = 1.0
    """About which share of the state that is offloaded goes there; the rest stays on the
    devices."""

    @property
    def on_disk(self) -> bool:
        """Whether anything is on disk."""
        return "disk" in (self.offload_optimizer, self.offload_params)

    def offload(self, path: Path | None) -> Offload:
        """Return what `ZeroConfig` takes as `offload`; `path` is the folder on disk."""
        return Offload(
            optimizer=self.offload_optimizer,
            params=self.offload_params,
            secondary=self.offload_secondary,
            update=self.offload_update,
            ratio=self.offload_ratio,
            path=None if path is None else str(path),
        )

    def check(self, zero: str, pipe: int) -> None:
        """Check what other options must have for it.

        Args:
          zero: the option --zero.
          pipe: stages.

        Raises:
          ValueError: they do not have it.
        """
        on_host = self.offload_optimizer == "host" and not self.on_disk
        if self.offload_update == "host" and not on_host:
            raise ValueError(
                f"--offload-update host with --offload-optimizer {self.offload_optimizer} and "
                f"--offload-params {self.offload_params}: the host updates what is in its memory; "
                "use --offload-optimizer host and parameters not on disk, or --offload-update "
                "device"
            )
        if self.offload_params != "none" and pipe > 1:
            raise ValueError(
                f"--offload-params {self.offload_params} with --pipe {pipe}: parameters of a "
                "pipeline stay on the devices; use --offload-optimizer alone, or --pipe 1"
            )
        if self.offload_secondary != "none" and zero not in ("zeropp", "zeropp_hq"):
            raise ValueError(
                f"--offload-secondary {self.offload_secondary} with --zero {zero}, which keeps no "
                "secondary shards apart from the state; use --zero zeropp or zeropp_hq"
            )


@dataclass(frozen=True, kw_only=True)
class OffloadOptions(PlannedOffload):
    """State in the host's memory, or on its disk."""

    offload_path: Path | None = None
    """Folder on a fast disk of each host, for what goes to disk. Its file is the run's while that
    runs; what lasts are the checkpoints."""

    def check(self, zero: str, pipe: int) -> None:
        # A run may have a path that it has no use for any more when it is resumed.
        if self.on_disk and self.offload_path is None:
            raise ValueError(
                f"--offload-optimizer {self.offload_optimizer} and --offload-params "
                f"{self.offload_params} without --offload-path; name a folder on a fast disk of "
                "each host"
            )
        super().check(zero, pipe)
