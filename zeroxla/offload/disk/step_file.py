"""`StepFile`: the file of a step's states, one of its own under a folder that many may share.

A file is locked while its process has it open, and is removed when the last state in it is gone or
the process ends. A process that is killed leaves its file, without the lock; the host's next
process that makes a file in the folder removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import weakref
from collections.abc import Mapping
from pathlib import Path

from zeroxla.offload.disk.block_file import lock
from zeroxla.offload.disk.state_file import FileInUseError, StateFile

_numbers = itertools.count(1)


class StepFile:
    """Makes the file of a step's states, and finds it again while a state is in it.

    Args:
      folder: the folder of the file, `Offload(path=)`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser().resolve()
        self._made: weakref.ref[StateFile] | None = None

    def open(self, sizes: Mapping[str, int]) -> StateFile:
        """Return the step's file. An earlier state in it is then no longer valid.

        Args:
          sizes: the bytes of each array, by its name. For other sizes there is another file.

        Raises:
          ValueError: the folder cannot be written, or has too little room.
        """
        file = None if self._made is None else self._made()
        if file is None or not file.blocks.is_there or not file.is_of(sizes):
            file = _new_file(self._folder, sizes)
            self._made = weakref.ref(file)
        return file


def _new_file(folder: Path, sizes: Mapping[str, int]) -> StateFile:
    """Make a file that is removed once nothing refers to it."""
    _remove_left(folder)
    for number in _numbers:
        path = folder / f"zeroxla-{platform.node()}-{os.getpid()}-{number}.state"
        if path.exists():  # of a process with the same number, in another container
            continue
        # Another process may take the file for one that is left, until it is locked.
        with contextlib.suppress(FileInUseError):
            file = StateFile(path, sizes)
            weakref.finalize(file, _remove, path, os.stat(path), os.getpid())
            return file
    raise AssertionError("numbers do not end")


def _remove(path: Path, made: os.stat_result, process: int) -> None:
    """Remove a file if it is the one that was made, unless this is a fork of the process."""
    with contextlib.suppress(OSError):
        if os.getpid() == process and os.path.samestat(os.stat(path), made):
            path.unlink()


def _remove_left(folder: Path) -> None:
    """Remove the files of this host whose processes have ended. Locks of other hosts may not show
    here."""
    ours = re.compile(rf"zeroxla-{re.escape(platform.node())}-\d+-\d+\.state")
    for path in folder.iterdir() if folder.is_dir() else ():
        if not ours.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # it is in use, or somebody else's
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                lock(fd)
                path.unlink()
            finally:
                os.close(fd)
