"""The copy of a DeepSpeed configuration that a run keeps: the file of --deepspeed may change."""

from __future__ import annotations

import shutil
from pathlib import Path

from zeroxla.cli.zero_options import ZeroOptions

DEEPSPEED = "deepspeed.json"
"""The file of a run with the DeepSpeed configuration that it began with."""


def kept_deepspeed(options: ZeroOptions, run: Path | None) -> Path | None:
    """Return the DeepSpeed configuration of a run: its copy, or in a new run the option's file.

    Args:
      options: the run's options.
      run: the run's folder, if there is one already.
    """
    if options.deepspeed is None:
        return None
    copy = None if run is None else run / DEEPSPEED
    return copy if copy is not None and copy.is_file() else options.deepspeed.expanduser()


def keep_deepspeed(options: ZeroOptions, run: Path) -> None:
    """Copy the file of --deepspeed into a new run's folder.

    Raises:
      ValueError: it cannot be copied.
    """
    if options.deepspeed is None:
        return
    try:
        shutil.copyfile(options.deepspeed.expanduser(), run / DEEPSPEED)
    except OSError as error:
        raise ValueError(
            f"cannot copy --deepspeed {options.deepspeed} to {run}: {error.strerror}"
        ) from error
