"""`Post`: named bytes between the processes of islands. Whoever sends, calls.

A connection carries bytes in one direction, from its caller. What arrives is kept by name and
sender until somebody takes it, so that two processes may send to each other at the same time.
"""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable

from zeroxla.step.islands.membership.door import Door, call, hang_up
from zeroxla.step.islands.membership.frames import FrameError, FrameReader, FrameWriter

_POLL_S = 0.1
ASK = "ask/"
"""Names of questions begin with it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a process listens.

    Attributes:
      host: its host.
      port: its port.
      member: the number of the process; somebody else who listens there is not it.
    """

    host: str
    port: int
    member: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What another process asks for.

    Attributes:
      asker: where the answer goes.
      name: what it asks for.
    """

    asker: Address
    name: str


class Post:
    """Sends to other processes, and keeps what they send.

    Args:
      member: the number of this process.
      token: the secret of the run.
      host: the address to listen at.
      port: the port; 0 takes a free one.
      max_bytes: the most bytes of a frame that is taken.

    Attributes:
      member: the number of this process.
      port: where it listens.
      num_sent: the bytes sent so far, without framing.
      questions: frames whose names begin with ASK.

    Raises:
      ValueError: the address cannot be listened at, or the token is empty.
    """

    def __init__(
        self, member: int, token: str, host: str = "0.0.0.0", port: int = 0, *, max_bytes: int
    ) -> None:
        self.member, self._token, self._max_bytes = member, token, max_bytes
        self.num_sent = 0
        self.questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._heard_at: dict[int, float] = {}
        self._arrived: dict[tuple[str, int], bytes] = {}
        self._change = threading.Condition()
        self._links: dict[int, tuple[socket.socket, FrameWriter]] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._closed = False
        self._is_stale: Callable[[str], bool] = lambda name: False
        self._door = Door(host, port, token, member, self._read)
        self.port = self._door.port

    def send(self, to: Address, name: str, body: bytes, *, timeout: float) -> None:
        """Send bytes under a name. A lost connection is made again once.

        Raises:
          ConnectionError: the process was not to be reached within `timeout` seconds.
        """
        with self._change:
            lock = self._locks.setdefault(to.member, threading.Lock())
        with lock:
            for attempt in range(2):
                kept = to.member in self._links
                try:
                    connection, writer = self._links.get(to.member) or self._call(to, timeout)
                    connection.settimeout(timeout)
                    writer.write(name, body)
                    self.num_sent += len(body)
                    return
                except (OSError, ValueError) as error:
                    if found := self._links.pop(to.member, None):
                        hang_up(found[0])
                    if attempt or not kept:
                        raise ConnectionError(f"{to.host}:{to.port}: {error}") from error

    def take(
        self, source: int, name: str, *, timeout: float, is_over: Callable[[], bool]
    ) -> bytes | None:
        """Return what a process has sent under a name, when it is there; None once `is_over()`.

        Raises:
          TimeoutError: nothing has come from the process for `timeout` seconds.
        """
        began = time.monotonic()
        with self._change:
            while (name, source) not in self._arrived:
                if is_over():
                    return None
                heard_at = max(began, self._heard_at.get(source, began))
                if time.monotonic() > heard_at + timeout:
                    raise TimeoutError(f"{name!r} has not come for {timeout:.0f} s")
                self._change.wait(_POLL_S)
            return self._arrived.pop((name, source))

    def forget(self, is_stale: Callable[[str], bool]) -> None:
        """Drop what has a stale name, now and when it comes."""
        with self._change:
            self._is_stale = is_stale
            self._arrived = {k: v for k, v in self._arrived.items() if not is_stale(k[0])}

    def hang_up(self, member: int) -> None:
        """Close the connection to a process: the next one gets through sooner after a cut."""
        if found := self._links.pop(member, None):
            hang_up(found[0])

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._door.close()
        for connection, _ in list(self._links.values()):
            hang_up(connection)

    def _call(self, to: Address, timeout: float) -> tuple[socket.socket, FrameWriter]:
        """Connect to a process."""
        connection, other, key = call(to.host, to.port, self._token, self.member, timeout=timeout)
        if other != to.member:
            hang_up(connection)
            raise ConnectionError("another process listens there by now")
        if self._closed:
            hang_up(connection)
            raise ConnectionError("this process leaves")
        self._links[to.member] = connection, FrameWriter(connection, key, self.member)
        return self._links[to.member]

    def _read(self, connection: socket.socket, source: int, key: bytes) -> None:
        """Keep what a process sends, until it leaves; runs in a thread."""

        def heard() -> None:
            self._heard_at[source] = time.monotonic()

        host = str(connection.getpeername()[0])
        reader = FrameReader(connection, key, source, self._max_bytes, heard)
        while True:
            name, body = reader.read()
            if name.startswith(ASK):
                self.questions.put(_question(source, host, name, body))
                continue
            with self._change:
                if not self._is_stale(name):
                    self._arrived[name, source] = body
                self._change.notify_all()


def _question(source: int, host: str, name: str, body: bytes) -> Question:
    """Return a question; its body is the place to answer to, "port" or "port host".

    Raises:
      FrameError: it has another form.
    """
    port, _, own = body.decode("ascii", "replace").partition(" ")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise FrameError("a question has no port")
    asker = Address(host=own or host, port=int(port), member=source)
    return Question(asker=asker, name=name.removeprefix(ASK))
