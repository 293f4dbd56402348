"""`AppendedFiles`: files of a run folder that grow, and lose nothing when a disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroxla.checkpoint.errors import in_words
from zeroxla.cli.errors import RunFolderError


class AppendedFiles:
    """Appends entries to files of a folder, each whole or not at all.

    A write that fails, as on a full disk, is no error: it is reported once, and entries wait in
    memory until the disk takes them.

    Args:
      folder: the folder. It may be made later than this.
      report: called with a sentence when entries cannot be written, and when they can again.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._report = folder, report
        self._pending: list[tuple[str, bytes]] = []  # (file name, entry) in the order of writing
        self._failing = False

    def keep(self, name: str, entry: bytes) -> None:
        """Take an entry that the next `append` or `close` writes."""
        self._pending.append((name, entry))

    def append(self, name: str, entry: bytes) -> None:
        """Append an entry to the file of this name, after those that wait."""
        self.keep(name, entry)
        error = self._flush()
        if error and not self._failing:
            self._report(
                f"cannot write metrics to {self._folder}: {error}\n"
                "training goes on, and lines wait in memory until there is room"
            )
        elif self._failing and not error:
            self._report(f"metrics are written to {self._folder} again")
        self._failing = error is not None

    def close(self, name: str) -> None:
        """Write the entries that wait.

        Args:
          name: the file whose lost entries the error counts.

        Raises:
          RunFolderError: entries could not be written.
        """
        error = self._flush()
        if error:
            num_lines = sum(file == name for file, _ in self._pending)
            raise RunFolderError(
                f"{num_lines} lines could not be written to {self._folder / name}: {error}"
            )

    def _flush(self) -> str | None:
        """Append the entries that wait; return the error that stopped it, or None."""
        try:
            while self._pending:
                name, entry = self._pending[0]
                with open(self._folder / name, "ab", buffering=0) as file:
                    append_whole(file, entry)
                del self._pending[0]
        except OSError as error:
            return in_words(error, self._folder)
        return None


def append_whole(file: Any, data: bytes) -> None:
    """Append all of `data` to an unbuffered binary file, or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise
