"""Watches the processes of a launch; stops all when one fails, and says which and why."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroxla.launch.process import Process
from zeroxla.launch.ranks import Rank

# After a failure: for others to say what they saw of it, and then to end by themselves.
_SETTLE = 2.0
_FAREWELL = 5.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
      status: for a shell: 0 if all ended well.
      message: what went wrong; "" if nothing did.
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
      ranks: what to start.
      order: argv and cwd of the program.
      deadline: seconds without a sign of life after which a process counts as hung; 0 for no limit.
      grace: seconds to end in after the first SIGINT or SIGTERM, which is passed on as SIGTERM; a
        second one ends all at once.
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
    stopped = [p for p in processes if p.stopped_at is not None and p is not first]
    facts = [_stopped(p) for p in stopped]
    if first.error is not None:
        facts.append(f"{_name(first)} {first.error}.")
    else:
        facts.append(f"{_name(first)} {_end_of(first)} {after:.0f} s after the start.")
        facts.append(_lines_of(first))
    text = " ".join(facts)
    status = first.code if first.code is not None else 1
    return Outcome(status if status > 0 else 128 - status, text, interrupted)


def _hung(processes: Sequence[Process], began: float, deadline: float) -> Outcome:
    running = [p for p in processes if not p.has_ended]
    stopped = [p for p in running if p.stopped_at is not None]
    silent = min(running, key=lambda p: p.heard_at)
    facts = [_stopped(p) for p in stopped]
    facts.append(
        f"{_name(silent)} gave no sign of life for {time.monotonic() - silent.heard_at:.0f} s "
        f"(--deadline {deadline:g}), {time.monotonic() - began:.0f} s after the start."
    )
    text = " ".join([*facts, _lines_of(silent)])
    _dismiss(processes)
    return Outcome(1, text)


def _dismiss(processes: Sequence[Process]) -> None:
    for process in processes:
        process.send(signal.SIGTERM)
    until = time.monotonic() + _FAREWELL
    while time.monotonic() < until and not all(p.has_ended for p in processes):
        time.sleep(0.1)


def _name(process: Process) -> str:
    where = process.rank.host if process.pid is None else f"{process.rank.host}, {process.pid}"
    return f"Rank {process.rank.number} ({where})"


def _stopped(process: Process) -> str:
    assert process.stopped_at is not None
    seconds = time.monotonic() - process.stopped_at
    return f"{_name(process)} has been stopped by a signal for {seconds:.0f} s."


def _end_of(process: Process) -> str:
    assert process.code is not None
    if process.code < 0:
        return f"was killed by {signal.Signals(-process.code).name}"
    return f"ended with exit code {process.code}"


def _lines_of(process: Process) -> str:
    lines = process.last_lines
    if not lines:
        return "It printed nothing."
    return "Its last lines:\n" + "\n".join(f"  {line}" for line in lines)


@contextlib.contextmanager
def _signals(changed: queue.SimpleQueue[Process | None]) -> Iterator[list[int]]:
    """While inside, collect SIGINT and SIGTERM."""
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
