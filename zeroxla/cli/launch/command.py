"""The command line of `zeroxla launch`, and of commands that start themselves on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.run import launch
from zeroxla.cli.read_options import read_options
from zeroxla.mesh.processes.environment import PROCESS_ID, find_cluster


def run(arguments: Sequence[str]) -> int:
    """Run `zeroxla launch`: its options, then `--`, then the program; return the exit status.

    Raises:
      UsageError: the host file or the program cannot be used.
    """
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options = read_options("launch", arguments[:at], LaunchOptions)
    try:
        return launch(options, arguments[at + 1 :])
    except ValueError as error:
        raise UsageError(str(error)) from error


def launch_again(
    command: str,
    arguments: Sequence[str],
    *,
    nodes: int | None,
    devices_per_node: int | None,
    stages: int = 1,
) -> int | None:
    """Start a command again as one process for each node, and wait until all have ended.

    Args:
      command: the command's name.
      arguments: the words after it.
      nodes: nodes of a stage. None means one.
      devices_per_node: as `LaunchOptions` has it.
      stages: stages of a pipeline, each on nodes of its own.

    Returns:
      The exit status. None if nothing was started: because there is one node, or because this
      process has been started as one of several.
    """
    if nodes in (None, 1) or os.environ.get(PROCESS_ID) or find_cluster() is not None:
        return None
    options = LaunchOptions(nodes=nodes * stages, devices_per_node=devices_per_node)
    return launch(options, [sys.executable, "-m", "zeroxla", command, *arguments])
