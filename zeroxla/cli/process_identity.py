"""`ProcessIdentity`: names a process so that others can later say whether it still runs."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from pathlib import Path

_PROC = Path("/proc")
_DEAD = ("Z", "X")  # ended, and its parent has not asked for its status yet


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process of some host.

    Attributes:
      host: the host's name, for people.
      place: what numbers its processes: a start of a machine, and a container there.
      pid: its number.
      started: when it started, as its system writes that. A later process of the same number has
        another value.
    """

    host: str
    place: str
    pid: int
    started: str

    @staticmethod
    def mine() -> ProcessIdentity:
        """Return the identity of this process."""
        pid = os.getpid()
        started = _started(pid) or ""
        return ProcessIdentity(host=platform.node(), place=_place(), pid=pid, started=started)

    def is_here(self) -> bool:
        """Return whether this process can look for that one: they share a machine and a
        container."""
        return self.place == _place()

    def runs(self) -> bool:
        """Return whether the process still runs. It must be here."""
        return _started(self.pid) == self.started


def _place() -> str:
    """Return what is the same for two processes if one number means one process to both."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def _started(pid: int) -> str | None:
    """Return when a process of this host started; None if there is none of this number."""
    if (_PROC / "self").exists():
        try:
            line = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name before the last parenthesis may hold spaces. Then: state, 18 numbers, the start.
        fields = line.rpartition(")")[2].split()
        return None if fields[0] in _DEAD else fields[19]
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
