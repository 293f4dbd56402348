"""Options of several commands: which state lives in the host's memory, or on its disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zeroxla.config.offload import Offload


@dataclass(frozen=True, kw_only=True)
class PlannedOffload:
    """State that lives in the host's memory, or on its disk."""

    offload_optimizer: Literal["none", "host", "disk"] = "none"
    """Place of the optimizer's state between updates; none means the devices."""
    offload_params: Literal["none", "host", "disk"] = "none"
    """Place of the parameters' float32 master copy; none means the devices."""
    offload_secondary: Literal["none", "host"] = "none"
    """Place of ZeRO++'s secondary shards from forward to backward; none means the devices."""
    offload_update: Literal["device", "host"] = "device"
    """Processor that updates the state on the host; host needs --offload-optimizer host."""
    offload_ratio: float = 1.0
    """Share of the offloaded state that goes there, about; the rest stays on the devices."""

    @property
    def on_disk(self) -> bool:
        """Whether anything is on disk."""
        return "disk" in (self.offload_optimizer, self.offload_params)

    def offload(self, path: Path | None) -> Offload:
        """Return the value of `ZeroConfig.offload`; `path` is the folder on disk."""
        from zeroxla.config.offload import Offload  # here, because --help need not wait for JAX

        return Offload(
            optimizer=self.offload_optimizer,
            params=self.offload_params,
            secondary=self.offload_secondary,
            update=self.offload_update,
            ratio=self.offload_ratio,
            path=None if path is None else str(path),
        )

    def check(self, zero: str, pipe: int) -> None:
        """Check these options against each other and against two others.

        Args:
          zero: the option --zero.
          pipe: the option --pipe.

        Raises:
          ValueError: they do not go together.
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
    """State that lives in the host's memory, or on its disk."""

    offload_path: Path | None = None
    """Folder on a fast disk of each host, for state on disk. The file in it serves the run while it
    runs; checkpoints are what remains."""

    def check(self, zero: str, pipe: int) -> None:
        # A path without state on disk is no error: a resumed run may have been given one before.
        if self.on_disk and self.offload_path is None:
            raise ValueError(
                f"--offload-optimizer {self.offload_optimizer} and --offload-params "
                f"{self.offload_params} without --offload-path; name a folder on a fast disk of "
                "each host"
            )
        super().check(zero, pipe)
