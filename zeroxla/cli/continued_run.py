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
from zeroxla.cli.islands.folders import folder_of, folder_of_options, island_folders, saved_at
from zeroxla.cli.option_groups import AUTO, JobOptions, flag
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
    times = {path: saved_at(path) for path in runs.glob("*") if _is_of(path, command)}
    found = {path: at for path, at in times.items() if at is not None}
    if not found:
        raise UsageError(
            f"--resume found no run with a checkpoint under {runs}/; name its folder with --run"
        )
    return max(found, key=lambda path: found[path])


def continued(
    command: str,
    arguments: Sequence[str],
    options: _Job,
    free: Collection[str],
    slot: int | None = None,
) -> _Job:
    """Return the options of a job. If it continues a run, the run's options are its defaults.

    With `--resume auto` a run begins if its folder has no checkpoint; what is returned has `resume`
    False then. An island continues from its own checkpoint. If it has none it begins anew, with the
    options of the other islands of the run, if there are any.

    Args:
      command: the command's name.
      arguments: the words after it.
      options: the options that they give to a new run.
      free: names of the options that may differ from the run's.
      slot: the number of the island that continues; None outside of islands.

    Raises:
      UsageError: the run cannot be read, is of another command, or has other options.
    """
    restarted = os.environ.get(RESTART, "0") != "0"
    named = RUNS / f"{command}-{os.environ[STARTED]}" if restarted else None
    run = options.output.run or named
    there = run is not None and has_checkpoint(folder_of(run, slot))
    resume = options.output.resume
    if resume == AUTO:
        if run is None:
            raise UsageError(
                f"--resume {AUTO} without --run: the next start would not find the run; name its "
                "folder with --run"
            )
        if slot is None and saved_at(run) is None:
            return _with_output(options, run, resume=False)
    elif not resume and not (restarted and there):
        return options
    run = run or newest_run(RUNS, command)
    source = folder_of_options(run, slot)
    begins = slot is not None and not has_checkpoint(folder_of(run, slot))
    if begins and not island_folders(run):
        return _with_output(options, run, resume=False)
    # The run's own options are the defaults. What the command line leaves out stays as it was; what
    # it names must be free to change.
    try:
        check_command(source, read_config(source), command)
        stored = stored_options(type(options), source)
        given = read_options(command, arguments, type(options), stored)
        check_resumable(stored, given, free)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _with_output(given, run, resume=not begins and (resume or True))


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


def _with_output(options: _Job, run: Path, *, resume: bool | str) -> _Job:
    output = dataclasses.replace(options.output, run=run, resume=resume)
    return dataclasses.replace(options, output=output)  # pyright: ignore[reportArgumentType]


def _is_of(path: Path, command: str) -> bool:
    try:
        config = read_config(folder_of_options(path, None))
    except ValueError:
        return True  # what is wrong with it is said when it is opened
    return config.get("command", "train") == command


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
