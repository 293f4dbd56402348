"""The options of `zeroxla explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """Explain what a step of a run waits for, what its time goes to, and which settings would
    change that, on devices that need not be there. Neither weights nor data are read. The exit
    status is 1 if a setting would shorten the step, and 0 if none would."""

    run: Annotated[Path, tyro.conf.Positional]
    """The folder of a run of `zeroxla train`."""
    nodes: int | None = None
    """Number of nodes. Default: the run's --nodes, or 2."""
    devices_per_node: int | None = None
    """Number of devices of a node. Default: the run's --devices-per-node, or 4."""
    batch: int | None = None
    """Sequences or images per step, over all devices and micro-batches. Default: the run's."""
    device: str = "h200"
    """Kind of device; the default stands for CPUs in `zeroxla.explain`, too. An unknown kind lists
    all kinds."""
    link: str = "100gbit"
    """Link between nodes: a rate that the devices of a node share, or the name of a link. An
    unknown name lists all names."""
    machines: Path | None = None
    """TOML file with more devices and links, in the form of zeroxla/mesh/machines.toml."""
    compile: bool = True
    """Compile the step, for the device if it has a description (target) and the extra plan-gpu is
    installed, and otherwise for the CPU. Without, collectives that the compiler adds to the update
    are not known."""
    least_share: float = 0.01
    """Waits below this share of a step are no stalls."""
    json: bool = False
    """Print the report as JSON."""
    picture: Path | None = None
    """File for a picture of the time line: the work of the device and of each link, and waits."""

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if not 0 <= self.least_share < 1:
            raise ValueError(f"--least-share {self.least_share}: give 0 or more, and less than 1")
