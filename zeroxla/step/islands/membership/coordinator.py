"""`Coordinator`: hands out the rounds in which islands exchange. A small process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroxla.mesh.processes.address import address_of, split_address
from zeroxla.step.islands.membership.door import Door
from zeroxla.step.islands.membership.frames import FrameError, FrameReader
from zeroxla.step.islands.membership.ledger import Ledger
from zeroxla.step.islands.membership.line import Line, beat_of, next_message
from zeroxla.step.islands.membership.messages import MAX_BYTES, MemberReport, View
from zeroxla.step.islands.membership.rounds import Rounds

MEMBER = 0
"""The coordinator's own number."""
_SAVE_AGAIN_S = 1.0


class Coordinator:
    """Knows which islands are there, and decides who takes part in which round.

    It sees no parameters: islands send those to each other. If it ends, islands go on training;
    when it is started again with the same file they meet again. It runs until `close`.

    Args:
      address: where it listens, "host:port"; with port 0 a free one is taken.
      token: a secret that all islands share; it does not travel, and all bytes prove it.
      num_islands: the first round waits for so many islands. Later ones take those that are there.
      state: the file that it goes on from, and writes after each round. None keeps nothing.
      deadline: seconds that a round waits for an island that is late, and for one that is silent.
        An exchange may take twice as long.
      say: is called with what happens, a dict with "what".

    Attributes:
      address: where it listens.

    Raises:
      ValueError: the address cannot be listened at, the token is empty, a number is out of range,
        or the file is not one of a coordinator.

    Example:
      >>> with Coordinator("127.0.0.1:0", "secret", num_islands=2) as coordinator:
      ...     coordinator.address.startswith("127.0.0.1:")
      True
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        num_islands: int,
        state: Path | str | None = None,
        deadline: float = 60.0,
        say: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        if num_islands < 1:
            raise ValueError(f"num_islands={num_islands}; a run has at least 1")
        if not deadline > 0:
            raise ValueError(f"deadline={deadline}; give seconds above 0")
        host, port = split_address(address, least=0)
        self._path = None if state is None else Path(state)
        ledger = Ledger() if self._path is None else Ledger.load(self._path)
        self._deadline, self._say = deadline, say
        self._rounds = Rounds(ledger, num_islands=num_islands, deadline=deadline)
        self._unsaved, self._save_at = True, 0.0
        self._heard: queue.SimpleQueue[tuple[int, str, MemberReport | Line | None]] = (
            queue.SimpleQueue()
        )
        self._lines: dict[int, tuple[Line, View | None]] = {}
        if self._path is not None:
            try:
                self._rounds.ledger.save(self._path)  # A folder that is not there is found now.
            except OSError as error:
                raise ValueError(f"cannot write {self._path}: {error.strerror}") from error
        self._door = Door(host, port, token, MEMBER, self._read)
        self.address = address_of(host, self._door.port)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="zeroxla-coordinator")
        self._thread.start()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End; islands go on training."""
        self._closed.set()
        self._door.close()
        self._heard.put((MEMBER, "", None))
        self._thread.join()
        for line, _ in self._lines.values():
            line.close()

    @property
    def ledger(self) -> Ledger:
        """What it knows of the run."""
        return self._rounds.ledger

    def _read(self, connection: socket.socket, member: int, key: bytes) -> None:
        """Hear a process until it leaves or is silent; runs in a thread."""
        host = str(connection.getpeername()[0])
        line = Line(connection, key, MEMBER, beat_of(self._deadline))
        connection.settimeout(self._deadline)
        self._heard.put((member, host, line))
        try:
            reader = FrameReader(connection, key, member, MAX_BYTES)
            while True:
                self._heard.put((member, host, MemberReport.of(next_message(reader))))
        except (OSError, FrameError):
            line.close()
            self._heard.put((member, host, None))

    def _run(self) -> None:
        """Decide, save and tell, until the end; runs in a thread."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                self._take(*self._heard.get(timeout=self._patience()))
                while True:
                    self._take(*self._heard.get_nowait())
            now = time.monotonic()
            if not self._unsaved or now >= self._save_at:
                self._unsaved |= self._rounds.decide(now)
                self._unsaved = self._unsaved and not self._save(now)
            if not self._unsaved:
                self._tell(now)
            for event in self._rounds.events:
                self._say(event)
            self._rounds.events.clear()

    def _patience(self) -> float:
        """Return the seconds to wait for the next report."""
        if self._unsaved:
            return max(0.0, self._save_at - time.monotonic())
        at = self._rounds.next_time()
        return 3600.0 if at is None else min(max(0.0, at - time.monotonic()), 3600.0)

    def _take(self, member: int, host: str, what: MemberReport | Line | None) -> None:
        """Take what has been heard of a process."""
        if isinstance(what, Line):
            if member in self._lines:
                self._lines[member][0].close()
            self._lines[member] = what, None
        elif what is None:
            if member in self._lines and self._lines[member][0].has_ended:
                del self._lines[member]
                self._rounds.lost(member)
        elif member in self._lines:
            self._rounds.heard(member, what, host, time.monotonic())

    def _save(self, now: float) -> bool:
        """Write the file; return whether it is there. Nobody is told what was not written."""
        if self._path is not None:
            try:
                self._rounds.ledger.save(self._path)
            except OSError as error:
                self._save_at = now + _SAVE_AGAIN_S
                self._say({"what": "unsaved", "path": str(self._path), "error": error.strerror})
                return False
        return True

    def _tell(self, now: float) -> None:
        """Send each process its view, if it has changed."""
        for member, (line, last) in list(self._lines.items()):
            view = self._rounds.view(member, now)
            if view is not None and (last is None or _lasting(view) != _lasting(last)):
                line.tell(view.to_bytes())
                self._lines[member] = line, view


def _lasting(view: View) -> View:
    """Return a view without the time in it."""
    return dataclasses.replace(view, closes_in=None if view.closes_in is None else 0.0)
