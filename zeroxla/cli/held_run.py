"""`HeldRun`: a run folder while a run works in it, and the errors of writing there in words."""

from __future__ import annotations

from pathlib import Path

import jax

from zeroxla.checkpoint.errors import SaveError, full_disk, in_words
from zeroxla.cli.error_log import ErrorLog
from zeroxla.cli.errors import LostRunError, RunFolderError
from zeroxla.cli.run_lock import RunLock
from zeroxla.mesh.processes.exchange import on_first


class HeldRun:
    """Keeps other runs from a run folder, and errors of libraries from the screen, until `release`.

    All processes of a run make it together; the first holds the lock.

    Args:
      path: the run folder.

    Attributes:
      errors: takes the errors of libraries.

    Raises:
      ValueError: in every process, if another run holds the folder or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._lock = on_first("run folder", lambda: RunLock.take(path))
        number = jax.process_index()
        self.errors = ErrorLog(path / (f"errors-{number}.log" if number else "errors.log"))
        self.errors.open()

    def check(self) -> None:
        """Check that the folder is still this run's.

        Raises:
          LostRunError: in every process, if another run has taken it over.
        """
        try:
            on_first("run folder", lambda: self._lock and self._lock.check())
        except ValueError as error:
            raise LostRunError(str(error)) from error

    def release(self) -> None:
        """Give the folder back."""
        self.errors.close()
        if self._lock is not None:
            self._lock.release()


def unwritten(error: Exception) -> str | None:
    """Return what could not be written, where and why, in a line; None for errors of another kind.

    Args:
      error: of the run folder, of a checkpoint, or of a full disk anywhere.
    """
    if isinstance(error, (RunFolderError, SaveError)):
        return str(error).partition("\n")[0]
    if full_disk(error) is None:
        return None
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {error.filename}: {in_words(error, Path(error.filename).parent)}"
    return str(error)
