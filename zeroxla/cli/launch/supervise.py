"""`supervise`: watch the processes of a launch, and stop all when one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from zeroxla.cli.errors import INTERRUPTED
from zeroxla.cli.launch import messages
from zeroxla.cli.launch.process import Process
from zeroxla.cli.launch.ranks import Rank
from zeroxla.cli.launch.stop_signals import StopSignals

# Seconds after a failure in which other processes may report it, and then end by themselves.
_SETTLE = 2.0
_FAREWELL = 2.0
# A pause between steps that is this many times the longest one so far is a hang.
_USUAL = 2.0
# Seconds after the heartbeat in which JAX says itself that it is missing.
_BY_ITSELF = 1.0
# Seconds by which others may report an end before the report of the end itself arrives.
_DELAY = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
      status: the exit status for a shell; 0 if all ended well, INTERRUPTED if processes say that
        they were interrupted and have saved.
      message: a description of the failure; "" if there is none.
      interrupted: whether a signal asked for the end, of all or of a process.
    """

    status: int
    message: str = ""
    interrupted: bool = False


def supervise(
    ranks: Sequence[Rank],
    order: Mapping[str, Any],
    *,
    deadline: float,
    heartbeat: float,
    grace: float,
    signals: StopSignals,
) -> Outcome:
    """Run processes to their end.

    Args:
      ranks: the processes to start.
      order: argv, cwd and progress, as `child.py` reads them.
      deadline: seconds without a sign of life after which a process counts as hung; 0 for no limit.
      heartbeat: seconds that the others may wait in a step for a process without a sign of life.
      grace: seconds in which the processes may end after the first SIGINT or SIGTERM, which reaches
        them as SIGTERM. A second one ends all at once.
      signals: collects them.
    """
    changed: queue.SimpleQueue[Process | None] = queue.SimpleQueue()
    signals.wake(changed)
    began = time.monotonic()
    errors: set[str] = set()
    processes = [Process(rank, order, changed.put, errors) for rank in ranks]
    try:
        return _watch(processes, changed, signals.numbers, began, deadline, heartbeat, grace)
    finally:
        for process in processes:
            process.kill()


def _watch(
    processes: Sequence[Process],
    changed: queue.SimpleQueue[Process | None],
    signals: Sequence[int],
    began: float,
    deadline: float,
    heartbeat: float,
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
            if process.has_failed:
                return _failed(processes, began)
            if deadline and not process.has_ended and now - process.heard_at > deadline:
                running = [p for p in processes if not p.has_ended]
                text = messages.hung(running, deadline, now - began)
                return _end_all(processes, text)
        for process in processes:
            waited = others_wait(process, processes, now)
            if waited > max(heartbeat, _USUAL * process.longest) + _BY_ITSELF:
                text = messages.behind(process, processes, waited, heartbeat, now - began)
                return _end_all(processes, text)
    if any(p.has_failed for p in processes):
        return _failed(processes, began, interrupted=bool(signals))
    status = max(p.code or 0 for p in processes)
    return Outcome(status, interrupted=bool(signals) or status == INTERRUPTED)


def _failed(processes: Sequence[Process], began: float, interrupted: bool = False) -> Outcome:
    after = time.monotonic() - began
    _await_end(processes, _SETTLE)
    first = first_to_fail(processes)
    _dismiss(processes)
    first.kill()  # it may have said that it fails, and not have ended
    status = first.code if first.code is not None else 1
    text = messages.failed(first, processes, after)
    return Outcome(status if status > 0 else 128 - status, text, interrupted)


def _end_all(processes: Sequence[Process], text: str) -> Outcome:
    _dismiss(processes)
    return Outcome(1, text)


def others_wait(process: Process, processes: Sequence[Process], now: float) -> float:
    """Return the seconds since which others are in a step that a silent process has not begun.

    JAX's heartbeat says that a process is there, not that it goes on: a thread of C++ sends it.
    A process that compiles may take longer than others. One whose steps have taken no time yet is
    not judged: it may wait for a result, and others run ahead.
    """
    ahead = [p.stepped_at for p in processes if p.steps > process.steps]
    if not ahead or process.longest == 0 or process.compiles or process.has_ended:
        return 0.0
    return now - max(process.heard_at, *ahead)


def first_to_fail(processes: Sequence[Process]) -> Process:
    """Return the process that failed first, of those that have failed.

    A process that finds a failure of another says so, or JAX aborts it. So it comes after one that
    said nothing, even if its report was faster.
    """

    def order(process: Process) -> tuple[bool, float]:
        assert process.failed_at is not None
        follows = process.fails_first is False or (
            process.code == -signal.SIGABRT and bool(process.notices)
        )
        ahead = _DELAY if process.fails_first is None else 0.0
        return follows, process.failed_at - ahead

    return min((p for p in processes if p.failed_at is not None), key=order)


def _dismiss(processes: Sequence[Process]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    _await_end(processes, _FAREWELL)


def _await_end(processes: Sequence[Process], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not all(p.has_ended for p in processes):
        time.sleep(0.1)
