"""The attempts of `zeroxla launch`, one after the other until one ends well."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from zeroxla.cli.launch.options import LaunchOptions
from zeroxla.cli.launch.ranks import make_ranks
from zeroxla.cli.launch.supervise import supervise
from zeroxla.mesh.processes.environment import PROGRESS


def launch(options: LaunchOptions, argv: Sequence[str]) -> int:
    """Run a program as the processes of a run.

    Args:
      options: the number of processes, their hosts, and the times to wait.
      argv: the program and its arguments.

    Returns:
      The exit status: 0 if all processes ended well in one attempt. Otherwise the status of the
      process that failed first in the last attempt, or 128 + the signal that ended it.

    Raises:
      ValueError: the host file or the program cannot be used.
    """
    if not argv:
        raise ValueError("launch needs a program; write it after --, as in: -- python train.py")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    order = {"argv": list(argv), "cwd": os.getcwd(), "progress": PROGRESS}
    for attempt in range(options.max_restarts + 1):
        ranks = make_ranks(options, attempt)
        outcome = supervise(
            ranks,
            order,
            deadline=options.deadline,
            heartbeat=options.heartbeat,
            grace=options.grace,
        )
        sys.stdout.flush()
        if outcome.message:
            console.print(Text.assemble(("launch: ", "bold red"), outcome.message))
        if outcome.status == 0 or outcome.interrupted:
            return outcome.status
        if attempt < options.max_restarts:
            left = options.max_restarts - attempt
            console.print(f"launch: starting all again ({left} of {options.max_restarts} left)")
    return outcome.status
