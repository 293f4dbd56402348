"""The run that a job continues: the one that `--resume` names, or the launcher's last attempt.

The run's own options are then the defaults of the command line.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from zeroxla.cli.errors import UsageError
from zeroxla.cli.option_groups import JobOptions, flag
from zeroxla.cli.read_options import read_options
from zeroxla.cli.run_folder import check_command, has_checkpoint, read_config
from zeroxla.cli.run_sections import stored_options
from zeroxla.mesh.processes.environment import RESTART, STARTED

RUNS = Path("runs")
"""The folder of runs whose own folder the command line does not name."""

_Job = TypeVar("_Job", bound=JobOptions)


def newest_run(runs: Path, command: str = "train") -> Path:
    """Return the run folder of a command that was changed last, of those with a checkpoint.

    Raises:
      UsageError: there is none.
    """
    found = [path for path in runs.glob("*") if has_checkpoint(path) and _is_of(path, command)]
    if not found:
        raise UsageError(
            f"--resume found no run with a checkpoint under {runs}/; name its folder with --run"
        )
    return max(found, key=lambda path: (path / "checkpoints").stat().st_mtime)


def continued(command: str, arguments: Sequence[str], options: _Job, free: Collection[str]) -> _Job:
    """Return the options of a job. If it continues a run, the run's options are its defaults.

    Args:
      command: the command's name.
      arguments: the words after it.
      options: the options that they give to a new run.
      free: names of the options that may differ from the run's.

    Raises:
      UsageError: the run cannot be read, is of another command, or has other options.
    """
    restarted = os.environ.get(RESTART, "0") != "0"
    named = RUNS / f"{command}-{os.environ[STARTED]}" if restarted else None
    run = options.output.run or named
    if not options.output.resume and not (restarted and run is not None and has_checkpoint(run)):
        return options
    run = run or newest_run(RUNS, command)
    # The run's own options are the defaults. What the command line leaves out stays as it was; what
    # it names must be free to change.
    try:
        config = read_config(run)
        check_command(run, config, command)
        stored = stored_options(type(options), run)
        given = read_options(command, arguments, type(options), stored)
        check_resumable(stored, given, free)
    except ValueError as error:
        raise UsageError(str(error)) from error
    output = dataclasses.replace(given.output, run=run, resume=True)
    return dataclasses.replace(given, output=output)  # pyright: ignore[reportArgumentType]


def check_resumable(stored: JobOptions, given: JobOptions, free: Collection[str]) -> None:
    """Check that `given` differs from the stored options of a run only where it may.

    Args:
      stored: the run's options.
      given: the options to go on with.
      free: names of the options that may differ.

    Raises:
      ValueError: with each option that differs, both values, and the remedy.
    """
    old, new = stored.to_dict(), given.to_dict()
    differing = [
        f"{flag(name)} is {value!r} there and {new[group][name]!r} here"
        for group, values in old.items()
        for name, value in values.items()
        if name not in free and _plain(value) != _plain(new[group][name])
    ]
    if differing:
        raise ValueError(
            f"cannot resume with another configuration: {'; '.join(differing)}; leave these "
            "options out, or start a new run without --resume"
        )


def _is_of(run: Path, command: str) -> bool:
    try:
        config = read_config(run)
    except ValueError:
        return True  # what is wrong with it is said when it is opened
    return config.get("command", "train") == command


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
