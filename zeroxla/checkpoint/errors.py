"""Errors of writing a checkpoint, in words; of a full disk also how much room there is."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from zeroxla.program.report import format_bytes

_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are untouched."""


def root_cause(error: BaseException) -> str:
    """Return the first error of a chain, in words."""
    while error.__cause__ is not None:
        error = error.__cause__
    # tensorstore appends its whole specification to the message.
    return str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0]


def full_disk(error: BaseException) -> str | None:
    """Return the system's words for a disk that takes no more, if an error or a cause of it has
    them; else None. Libraries raise errors of their own with these words in them."""
    cause: BaseException | None = error
    while cause is not None:
        for words in _FULL:
            if words in str(cause):
                return words
        cause = cause.__cause__
    return None


def in_words(error: OSError, folder: Path) -> str:
    """Return why something could not be written to a folder; on a full disk with the room there."""
    words = full_disk(error)
    return error.strerror or str(error) if words is None else f"{words} ({room(folder)})"


def room(folder: Path) -> str:
    """Return how much room there is on the disk of a folder, in words."""
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    except OSError:
        return "room unknown"


@contextlib.contextmanager
def quiet_absl() -> Iterator[None]:
    """Keep Orbax from logging a failed write's traceback once for each thread that it passes
    through. The one error that is raised says everything."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
