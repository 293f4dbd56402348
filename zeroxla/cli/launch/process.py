"""`Process`: one process of a launch, with its output, its signs of life and its end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from zeroxla.cli.errors import INTERRUPTED
from zeroxla.cli.launch.child import MARK
from zeroxla.cli.launch.notices import NoticeFilter, is_frame
from zeroxla.cli.launch.ranks import Rank
from zeroxla.mesh.processes import progress

LAST_LINES = 20
ERROR = "error: "
"""The beginning of the line with which a command refuses its options or its input."""
_printing = threading.Lock()


class Process:
    """Starts a rank, and passes its output on; each line begins with the rank's label.

    Times are `time.monotonic()`. All processes of an attempt share `errors`, the lines with which
    they have refused their options: each is passed on once.

    Attributes:
      rank: the rank that was started.
      pid: the program's process id on its host; None until it runs.
      code: the program's exit status, or minus the signal that ended it; None while it runs.
      error: the reason why it could not be started or is out of reach; None while all is well.
      stopped_at: the time at which a signal (SIGSTOP) stopped it; None while it runs.
      heard_at: the time at which it last printed, took a step, or was started.
      steps: the number of training steps that it has begun.
      stepped_at: the time at which it began the last one; the start if there is none.
      longest: the most seconds between two steps so far, if it compiled nothing between them.
      compiles: whether it compiles a program.
      failed_at: the time at which it ended badly, or said that it will; None while all is well.
      fails_first: whether it has found no other process that had failed before it; None if it has
        not said so.
    """

    def __init__(
        self,
        rank: Rank,
        order: Mapping[str, Any],
        changed: Callable[[Process], None],
        errors: set[str],
    ) -> None:
        self.rank, self._changed, self._errors = rank, changed, errors
        self.pid: int | None = None
        self.code: int | None = None
        self.error: str | None = None
        self.stopped_at: float | None = None
        self.heard_at = time.monotonic()
        self.steps = 0
        self.stepped_at = self.heard_at
        self.longest = 0.0
        self.compiles = False
        self._has_compiled = True  # before the first step
        self.failed_at: float | None = None
        self.fails_first: bool | None = None
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._notices: deque[str] = deque(maxlen=LAST_LINES)
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            rank.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._write(json.dumps({**order, "env": dict(rank.env)}))
        outputs = ((self._child.stdout, sys.stdout), (self._child.stderr, sys.stderr))
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True) for pair in outputs
        ]
        for reader in self._readers:
            reader.start()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, was never started, or is out of reach."""
        return self.code is not None or self.error is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than well, or interrupted and saved (INTERRUPTED)."""
        return self.has_ended and self.failed_at is not None

    @property
    def last_lines(self) -> list[str]:
        """The last lines that it printed, without JAX's notices about other processes."""
        return list(self._last)

    @property
    def notices(self) -> list[str]:
        """The last lines of JAX's notices about other processes, without stack traces."""
        return list(self._notices)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program and to all processes that it started."""
        self._write(number.name)

    def kill(self) -> None:
        """End it at once. Wait until it is gone and all its output has been passed on."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:  # a connection that hangs
            self._child.kill()
        self._waiter.join()

    def _write(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def _read(self, stream: IO[bytes], out: IO[str]) -> None:
        notices = NoticeFilter()
        with stream:
            for raw in stream:
                self._take(raw, out, notices)

    def _take(self, raw: bytes, out: IO[str], notices: NoticeFilter) -> None:
        text = raw.decode("utf-8", "replace").rstrip("\n")
        line, mark, said = text.partition(MARK)
        if mark:
            try:
                self._hear(json.loads(said))
            except ValueError:  # the program's own output, which happens to have the mark
                line = text
        if line or not mark:
            self.heard_at = time.monotonic()
            if notices.takes(line):
                if line and not is_frame(line):
                    self._notices.append(line)
                return
            self._last.append(line)
            with _printing:
                if line.startswith(ERROR):
                    if line in self._errors:  # another process has said it
                        return
                    self._errors.add(line)
                out.write(f"[{self.rank.label}] {line}\n")
                out.flush()

    def _hear(self, said: Mapping[str, Any]) -> None:
        match said:
            case {"pid": pid}:
                self.pid = pid
            case {"said": letters}:
                self.heard_at = time.monotonic()
                self._note(letters)
            case {"stopped": stopped}:
                self.stopped_at = time.monotonic() if stopped else None
            case {"exit": code}:
                if code not in (0, INTERRUPTED):
                    self._note_failure()
                self.code = code
            case {"error": error}:
                self._note_failure()
                self.error = error
        self._changed(self)

    def _note(self, letters: str) -> None:
        for letter in letters:
            if letter == progress.STEP:
                self._note_step()
            elif letter in (progress.COMPILES, progress.COMPILED):
                self.compiles = letter == progress.COMPILES
                self._has_compiled = True
            elif letter in (progress.FAILS_FIRST, progress.FAILS_AFTER):
                self._note_failure()
                self.fails_first = letter == progress.FAILS_FIRST

    def _note_step(self) -> None:
        before, self.stepped_at = self.stepped_at, time.monotonic()
        if not self._has_compiled:
            self.longest = max(self.longest, self.stepped_at - before)
        self._has_compiled = False
        self.steps += 1

    def _note_failure(self) -> None:
        self.failed_at = self.failed_at or time.monotonic()

    def _wait(self) -> None:
        for reader in self._readers:
            reader.join()
        code = self._child.wait()
        if not self.has_ended:  # it ended and said nothing
            self._note_failure()
            self.error = f"is out of reach: {self.rank.command[0]} ended with {code}"
        self._changed(self)
