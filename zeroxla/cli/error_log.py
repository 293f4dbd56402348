"""`ErrorLog`: errors that libraries print go to a file of the run folder, not to the screen.

When a write fails, Orbax, tensorstore and asyncio print tracebacks of hundreds of lines from their
threads. The run itself says in two lines what happened.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

LIMIT_BYTES = 128 * 2**10
"""Size from which nothing more is written."""
SHARE = 1 / 4
"""Share of the disk's room that the file may take: the rest is for the run, and metrics wait."""
_LOGGERS = ("absl", "asyncio")


class ErrorLog:
    """While it is open, errors of libraries are written to a file. If that cannot be written
    either, they are dropped.

    Args:
      file: the file. It is made with the first error.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.Lock()
        self._has_errors = False

    def write(self, text: str) -> None:
        """Append a text, with the time, if there is room."""
        self._has_errors = True
        with self._lock, contextlib.suppress(OSError):
            size = self.file.stat().st_size if self.file.exists() else 0
            free = shutil.disk_usage(self.file.parent).free
            left = min(LIMIT_BYTES, int((free + size) * SHARE)) - size
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n".encode()[:left]
            if left > 0:
                with open(self.file, "ab") as opened:
                    opened.write(line)

    def write_error(self, error: BaseException) -> None:
        """Append an error with its traceback."""
        self.write("".join(traceback.format_exception(error)))

    def open(self) -> None:
        """Begin to take the errors of libraries."""
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._hook
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._filter)

    def close(self) -> None:
        """Let libraries print them again."""
        if self._has_errors:
            gc.collect()  # asyncio tells of a failed task when nothing refers to it any more
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(self._filter)
        sys.unraisablehook = self._previous_hook

    def _filter(self, record: logging.LogRecord) -> bool:
        """Write an error; return whether its logger still shows the record."""
        if record.levelno < logging.ERROR:
            return True
        self.write(logging.Formatter("%(name)s: %(message)s").format(record))
        return False

    def _hook(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Write an error that a library's own thread could give to nobody."""
        if threading.current_thread() is threading.main_thread() or unraisable.exc_value is None:
            self._previous_hook(unraisable)
        else:
            self.write_error(unraisable.exc_value)
