"""The attempts of `zeroxla launch`, one after the other until one ends well."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from zeroxla.cli.launch.options import ProcessOptions
from zeroxla.cli.launch.ranks import ALONE, Share, make_ranks
from zeroxla.cli.launch.stop_signals import StopSignals
from zeroxla.cli.launch.supervise import Outcome, supervise
from zeroxla.mesh.processes.environment import PROGRESS


class Teller:
    """Prints what a launcher says, on standard error.

    Args:
      name: stands before each line: "launch".
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def failed(self, text: str) -> None:
        """Say that something has failed."""
        sys.stdout.flush()
        self._console.print(Text.assemble((f"{self._name}: ", "bold red"), text))

    def say(self, text: str) -> None:
        """Say something else."""
        self._console.print(f"{self._name}: {text}", markup=False)


def launch(
    options: ProcessOptions, argv: Sequence[str], *, name: str = "launch", share: Share = ALONE
) -> int:
    """Run a program as the processes of a run.

    Args:
      options: the number of processes, their hosts, and the times to wait.
      argv: the program and its arguments.
      name: the command's name, for messages.
      share: what the processes get besides.

    Returns:
      The exit status: 0 if all processes ended well in one attempt; INTERRUPTED (75) if they were
      interrupted and have saved, which is no failure. Otherwise the status of the
      process that failed first in the last attempt, or 128 + the signal that ended it.

    Raises:
      ValueError: the host file or the program cannot be used.
    """
    check_program(name, argv)
    teller = Teller(name)

    def again(left: int) -> None:
        teller.say(f"starting all again ({left} of {options.max_restarts} left)")

    with StopSignals() as signals:
        return run_attempts(options, argv, share, signals, teller.failed, again).status


def run_attempts(
    options: ProcessOptions,
    argv: Sequence[str],
    share: Share,
    signals: StopSignals,
    failed: Callable[[str], None],
    again: Callable[[int], None],
) -> Outcome:
    """Run a program as processes, again after each failure, as often as the options say.

    Args:
      options, argv, share: as `launch` takes them.
      signals: ask for the end.
      failed: is called with the message of each attempt that failed.
      again: is called before another attempt, with the number of those that are left.

    Returns:
      How the last attempt ended.

    Raises:
      ValueError: the host file cannot be used.
    """
    order = {"argv": list(argv), "cwd": os.getcwd(), "progress": PROGRESS}
    for attempt in range(options.max_restarts + 1):
        outcome = supervise(
            make_ranks(options, attempt, share),
            order,
            deadline=options.deadline,
            heartbeat=options.heartbeat,
            grace=options.grace,
            signals=signals,
        )
        sys.stdout.flush()
        if outcome.message:
            failed(outcome.message)
        if outcome.status == 0 or outcome.interrupted or signals.numbers:
            return outcome
        if attempt < options.max_restarts:
            again(options.max_restarts - attempt)
    return outcome


def check_program(name: str, argv: Sequence[str]) -> None:
    """Check that there is a program to start.

    Raises:
      ValueError: there is none.
    """
    if not argv:
        raise ValueError(f"{name} needs a program; write it after --, as in: -- python train.py")
