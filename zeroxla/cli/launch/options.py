"""The options of `zeroxla launch`, and those that `zeroxla island` shares with it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Start a program as one process for each node, and watch the processes."""

    nodes: int | None = None
    """Number of nodes, and of processes. Default: 1; with --hostfile, the number of its hosts."""
    devices_per_node: int | None = None
    """Devices of a node. Default: the slots of --hostfile, or all that there are; simulated devices
    are 8 in all."""
    hostfile: Path | None = None
    """File of lines `host slots=N`. A process is started on each host over ssh."""
    ssh: str = "ssh -o BatchMode=yes"
    """Command that runs a program on a host, for --hostfile; host and program follow it."""
    port: int | None = None
    """Port on which process 0 listens. Default: a free port; with --hostfile, 29400."""
    export: tuple[str, ...] = ()
    """Environment variables to pass on to other hosts. Those of JAX, XLA, NCCL, CUDA and Python are
    always passed on."""
    max_restarts: int = 0
    """Number of times that all processes are started again after a failure."""
    deadline: float = 600.0
    """Seconds without output or a training step after which a process counts as hung; 0 sets no
    limit."""
    heartbeat: float = 30.0
    """Seconds of silence between processes after which one counts as dead and the others end. Also
    the seconds that others wait in a step for one that neither takes it nor prints a line."""
    farewell: float = 5.0
    """Seconds in which all processes must end once one has ended; a run that goes on without it has
    failed."""
    grace: float = 60.0
    """Seconds in which processes may save and end after Ctrl-C or SIGTERM."""
    started: Annotated[str, tyro.conf.Suppress] = dataclasses.field(default_factory=_now)
    """Name of the run, the same in all processes and attempts."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("devices_per_node", 1), ("port", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: at least {least}")
        if self.port is not None and self.port > 65535:
            raise ValueError(f"--port {self.port}: at most 65535")
        for name in ("heartbeat", "farewell"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: at least 1")
        for name in ("max_restarts", "deadline", "grace"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions(ProcessOptions):
    """Start a program as one process for each node, watch the processes, and stop all when one
    fails. The program follows `--`, as in: zeroxla launch --nodes 2 -- python train.py

    The processes run on this machine, or on those of --hostfile. The program must call
    zeroxla.initialize() before it uses JAX. Without an accelerator a node's devices are simulated.

    With --islands the program is started once for each island, and --nodes are those of one island.
    An island that fails stops no other; --max-restarts starts it again, and it joins the others.
    """

    islands: int | None = None
    """Number of islands, which train by themselves and exchange what they have learned. They share
    out this machine's devices. Their coordinator runs in the launcher."""
    state: Path | None = None
    """File that the islands' coordinator goes on from, and writes after each round. Default: none,
    and it begins anew."""
    round_deadline: float = 60.0
    """Seconds that a round of the islands waits for an island that is late."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.islands is None:
            usual = {"--state": self.state is None, "--round-deadline": self.round_deadline == 60}
            if given := [name for name, is_usual in usual.items() if not is_usual]:
                raise ValueError(
                    f"{', '.join(given)}: without effect, there are no islands; leave out, or give "
                    "--islands 2"
                )
            return
        if self.islands < 1:
            raise ValueError(f"--islands {self.islands}: at least 1")
        if not self.round_deadline > 0:
            raise ValueError(f"--round-deadline {self.round_deadline}: above 0")
        if self.hostfile is not None:
            raise ValueError(
                f"--islands {self.islands} with --hostfile {self.hostfile}: islands of one launch "
                "share this machine; start `zeroxla coordinate` on one host, and `zeroxla island` "
                "for each island, which takes a --hostfile"
            )
        if self.port is not None:
            raise ValueError(
                f"--islands {self.islands} with --port {self.port}: each island takes a port of "
                "its own; leave it out"
            )
