"""Errors of writing a checkpoint, in words."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class SaveError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are untouched."""


def root_cause(error: BaseException) -> str:
    """Return the first error of a chain, in words."""
    while error.__cause__ is not None:
        error = error.__cause__
    # tensorstore appends its whole specification to the message.
    return str(error).split(" [tensorstore_spec")[0].split(" [os_error_code")[0]


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
