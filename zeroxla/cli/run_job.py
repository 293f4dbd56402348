"""`run_job`: makes a job, runs it, and turns what goes wrong into the command's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from zeroxla.checkpoint.errors import SaveError
from zeroxla.cli.errors import UsageError
from zeroxla.cli.job import Job


def run_job(make: Callable[[], Job[Any, Any]]) -> int:
    """Make a job and run it.

    Returns:
      The exit status: 0 when all steps are taken, INTERRUPTED when interrupted and saved, 1 if the
      last state could not be saved.

    Raises:
      UsageError: an option or an input cannot work. It is found before the first step.
      RunFolderError: something besides a checkpoint could not be written.
    """
    try:
        job = make()
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        status = job.run()
    except BaseException:
        with contextlib.suppress(SaveError):  # what ended the run is said
            job.close()
        raise
    job.close()
    return status
