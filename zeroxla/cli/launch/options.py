"""The options of `zeroxla launch`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Start a program as one process for each node, watch all, and stop all when one fails.

    On this machine, or with --hostfile on many. Where there is no accelerator a node's devices are
    simulated. The program calls zeroxla.initialize() first thing. What follows `--` is the program.
    """

    nodes: int | None = None
    """Nodes, and processes. Default: 1; with --hostfile all of its hosts."""
    devices_per_node: int | None = None
    """Devices of each. Default: the slots of --hostfile, else all there are; simulated, 8 in
    all."""
    hostfile: Path | None = None
    """A file of lines `host slots=N`: a process is started on each over ssh."""
    ssh: str = "ssh -o BatchMode=yes"
    """The command that is given a host and a program, with --hostfile."""
    port: int | None = None
    """Where process 0 listens. Default: a free port; with --hostfile 29400."""
    export: tuple[str, ...] = ()
    """Variables to pass on to other hosts, besides those of JAX, XLA, NCCL, CUDA and Python."""
    max_restarts: int = 0
    """How often all are started again after a failure."""
    deadline: float = 600.0
    """Seconds without a line of output or a training step after which a process counts as hung; 0
    for no limit."""
    heartbeat: float = 30.0
    """Seconds of silence between processes after which one counts as dead, and all others end."""
    grace: float = 60.0
    """Seconds that processes have to save and end after Ctrl-C or SIGTERM."""
    started: Annotated[str, tyro.conf.Suppress] = dataclasses.field(default_factory=_now)
    """Names the run, the same in all processes and attempts."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("devices_per_node", 1), ("port", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: at least {least}")
        if self.heartbeat < 1:
            raise ValueError(f"--heartbeat {self.heartbeat}: at least 1")
        for name in ("max_restarts", "deadline", "grace"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 0")
