"""`supervise`: watch the processes of a launch, and stop all when one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroxla.cli.launch import messages
from zeroxla.cli.launch.process import Process
from zeroxla.cli.launch.ranks import Rank

# Seconds after a failure in which other processes may report it, and then end by themselves.
_SETTLE = 2.0
_FAREWELL = 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
      status: the exit status for a shell; 0 if all ended well.
      message: a description of the failure; "" if all ended well.
      interrupted: whether a signal asked for the end.
    """

    status: int
    message: str = ""
    interrupted: bool = False


def supervise(
    ranks: Sequence[Rank], order: Mapping[str, Any], *, deadline: float, grace: float
) -> Outcome:
    """Run processes to their end.

    Args:
      ranks: the processes to start.
      order: argv, cwd and progress, as `child.py` reads them.
      deadline: seconds without a sign of life after which a process counts as hung; 0 for no limit.
      grace: seconds in which the processes may end after the first SIGINT or SIGTERM, which reaches
        them as SIGTERM. A second one ends all at once.
    """
    changed: queue.SimpleQueue[Process | None] = queue.SimpleQueue()
    width = len(str(len(ranks) - 1))
    began = time.monotonic()
    with _signals(changed) as signals:
        processes = [Process(rank, order, width, changed.put) for rank in ranks]
        try:
            return _watch(processes, changed, signals, began, deadline, grace)
        finally:
            for process in processes:
                process.kill()


def _watch(
    processes: Sequence[Process],
    changed: queue.SimpleQueue[Process | None],
    signals: Sequence[int],
    began: float,
    deadline: float,
    grace: float,
) -> Outcome:
    stop_by = None
    while not all(p.has_ended for p in processes):
        with contextlib.suppress(queue.Empty):
            changed.get(timeout=0.5)
        now = time.monotonic()
        if signals and stop_by is None:
            stop_by = now + grace
            for process in processes:
                process.send(signal.SIGTERM)
        if stop_by is not None:
            if len(signals) > 1 or now > stop_by:
                return Outcome(128 + signals[0], "stopped before all had ended", interrupted=True)
            continue
        for process in processes:
            if process.error is not None or process.code not in (None, 0):
                return _failed(process, processes, began)
            if deadline and not process.has_ended and now - process.heard_at > deadline:
                return _hung(processes, began, deadline)
    failed = [p for p in processes if p.code != 0]
    if failed:
        return _failed(failed[0], processes, began, interrupted=bool(signals))
    return Outcome(0, interrupted=bool(signals))


def _failed(
    first: Process, processes: Sequence[Process], began: float, interrupted: bool = False
) -> Outcome:
    after = time.monotonic() - began
    time.sleep(_SETTLE)
    _dismiss(processes)
    status = first.code if first.code is not None else 1
    text = messages.failed(first, processes, after)
    return Outcome(status if status > 0 else 128 - status, text, interrupted)


def _hung(processes: Sequence[Process], began: float, deadline: float) -> Outcome:
    running = [p for p in processes if not p.has_ended]
    text = messages.hung(running, deadline, time.monotonic() - began)
    _dismiss(processes)
    return Outcome(1, text)


def _dismiss(processes: Sequence[Process]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    until = time.monotonic() + _FAREWELL
    while time.monotonic() < until and not all(p.has_ended for p in processes):
        time.sleep(0.1)


@contextlib.contextmanager
def _signals(changed: queue.SimpleQueue[Process | None]) -> Iterator[list[int]]:
    """Collect the signals SIGINT and SIGTERM that come inside."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        changed.put(None)

    previous = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
