"""Reads host files: a line `name slots=N` for each host, as in Open MPI and DeepSpeed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

_LINE = re.compile(r"(?P<name>[^\s=#]+)(\s+slots=(?P<slots>\d+))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """A line of a host file.

    Attributes:
      name: the host's name for ssh; may be `user@host`.
      slots: the number of devices to use there. None means all.
    """

    name: str
    slots: int | None

    @property
    def address(self) -> str:
        """Return the name without the user."""
        return self.name.rpartition("@")[2]


def read_hostfile(path: Path) -> list[Host]:
    """Read a host file. Empty lines, and the rest of a line after a `#`, are skipped.

    Raises:
      ValueError: the file cannot be read, names no host or one twice, has a line of another form,
        or gives some hosts other slots than others.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"cannot read the host file {path}: {error.strerror}") from error
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f'{path}:{number}: {line!r} is not of the form "name slots=N"')
        slots = found["slots"]
        if slots is not None and int(slots) == 0:
            raise ValueError(f"{path}:{number}: slots=0; leave the host out, or give 1 or more")
        if any(found["name"] == host.name for host in hosts):
            raise ValueError(f"{path}:{number}: {found['name']} is there twice; add up its slots")
        hosts.append(Host(found["name"], None if slots is None else int(slots)))
    if not hosts:
        raise ValueError(f'{path} names no host; write a line "name slots=N" for each')
    if len({host.slots for host in hosts}) > 1:
        each = ", ".join(f"{h.name}: {h.slots or 'none given'}" for h in hosts)
        raise ValueError(f"{path}: a mesh has as many devices on each host, and slots are {each}")
    return hosts
