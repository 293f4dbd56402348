"""Messages about a run that failed: which process, how, when, and, if it is known, why."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Sequence

from zeroxla.cli.launch.process import ERROR, Process
from zeroxla.mesh.processes.environment import HEARTBEAT

# JAX prints this in processes that it ends because others are silent. Their numbers follow.
_SILENT = "stopped sending heartbeats"


def failed(first: Process, processes: Sequence[Process], after: float) -> str:
    """Return the message about a process that failed.

    Args:
      first: the process that failed first.
      processes: all processes.
      after: seconds since the start.
    """
    facts = [_stopped(p) for p in processes if p.stopped_at is not None and p is not first]
    facts += [_silent(p) for p in _unheard(processes) if p.stopped_at is None and p is not first]
    if first.error is not None:
        facts.append(f"{_name(first)} {first.error}.")
    else:
        facts.append(f"{_name(first)} {_end_of(first)} {after:.0f} s after the start.")
        if first.code == -signal.SIGABRT and first.notices and len(facts) == 1:
            # Nothing else says why.
            facts.append(f"JAX said in it:\n{_indented(first.notices)}\n")
        if not (first.code == 2 and first.last_lines[-1:] and is_error(first.last_lines[-1])):
            facts.append(_lines_of(first))  # or it stands above, and nothing came after it
    return " ".join(facts)


def hung(running: Sequence[Process], deadline: float, after: float) -> str:
    """Return the message about a run in which a process has given no sign of life for too long.

    Args:
      running: the processes that have not ended.
      deadline: seconds for which a process may be silent.
      after: seconds since the start.
    """
    silent = min(running, key=lambda p: p.heard_at)
    facts = [_stopped(p) for p in running if p.stopped_at is not None]
    facts.append(
        f"{_name(silent)} gave no sign of life for {time.monotonic() - silent.heard_at:.0f} s "
        f"(--deadline {deadline:g}), {after:.0f} s after the start."
    )
    return " ".join([*facts, _lines_of(silent)])


def behind(
    last: Process, processes: Sequence[Process], waited: float, heartbeat: float, after: float
) -> str:
    """Return the message about a process that does not take the step in which others wait for it.

    Args:
      last: the process.
      processes: all processes.
      waited: seconds since which the others wait.
      heartbeat: seconds for which they may.
      after: seconds since the start.
    """
    facts = [_stopped(p) for p in processes if p.stopped_at is not None]
    facts.append(
        f"{_name(last)} hangs: it has begun {last.steps} steps, and others have waited in the next "
        f"one for {waited:.0f} s (--heartbeat {heartbeat:g}), {after:.0f} s after the start."
    )
    return " ".join([*facts, _lines_of(last)])


def is_error(line: str) -> bool:
    """Return whether a command has refused its options or its input with a line."""
    return line.startswith(ERROR)


def _name(process: Process) -> str:
    where = process.rank.host if process.pid is None else f"{process.rank.host}, {process.pid}"
    return f"Rank {process.rank.number} ({where})"


def _stopped(process: Process) -> str:
    assert process.stopped_at is not None
    seconds = time.monotonic() - process.stopped_at
    return f"{_name(process)} has been stopped by a signal for {seconds:.0f} s."


def _unheard(processes: Sequence[Process]) -> Iterator[Process]:
    """Yield the processes that others report as silent."""
    said = "\n".join("\n".join(p.notices) for p in processes)
    _, found, rest = said.partition(_SILENT)
    numbers = re.match(r"\):\s*((?:(?:\S*task:)?\d+\s+)+)", rest)
    if found and numbers:
        silent = {int(n) for n in re.findall(r"(\d+)\s", numbers[1])}
        yield from (p for p in processes if p.rank.number in silent)


def _silent(process: Process) -> str:
    seconds = float(process.rank.env[HEARTBEAT])
    return (
        f"{_name(process)} was not heard of by the others for {seconds:g} s (--heartbeat): it "
        "hangs, or the network does not carry."
    )


def _end_of(process: Process) -> str:
    assert process.code is not None
    if process.code < 0:
        return f"was killed by {signal.Signals(-process.code).name}"
    return f"ended with exit code {process.code}"


def _lines_of(process: Process) -> str:
    lines = process.last_lines
    if not lines:
        return "It printed nothing."
    return f"Its last lines:\n{_indented(lines)}"


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
