"""The command line of `zeroxla launch`, and of commands that start themselves on several nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from zeroxla.cli.errors import UsageError
from zeroxla.cli.islands.launch import launch_islands
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
    return _launch(read_options("launch", arguments[:at], LaunchOptions), arguments[at + 1 :])


def launch_again(
    command: str,
    arguments: Sequence[str],
    *,
    nodes: int | None,
    devices_per_node: int | None,
    stages: int = 1,
    islands: int | None = None,
) -> int | None:
    """Start a command again as one process for each node, and wait until all have ended.

    Args:
      command: the command's name.
      arguments: the words after it.
      nodes: nodes of a stage. None means one.
      devices_per_node: as `LaunchOptions` has it.
      stages: stages of a pipeline, each on nodes of its own.
      islands: islands, each with these nodes. None means that there are none.

    Returns:
      The exit status. None if nothing was started: because there is one node and no island, or
      because this process has been started as one of several.

    Raises:
      UsageError: an option cannot work.
    """
    if os.environ.get(PROCESS_ID) or find_cluster() is not None:
        return None
    if nodes in (None, 1) and islands is None:
        return None
    if nodes in (None, 1):  # One process has all stages of its island.
        nodes, devices_per_node = 1, devices_per_node and devices_per_node * stages
    else:
        nodes *= stages
    options = LaunchOptions(nodes=nodes, devices_per_node=devices_per_node, islands=islands)
    return _launch(options, [sys.executable, "-m", "zeroxla", command, *arguments])


def _launch(options: LaunchOptions, argv: Sequence[str]) -> int:
    try:
        return launch(options, argv) if options.islands is None else launch_islands(options, argv)
    except ValueError as error:
        raise UsageError(str(error)) from error
