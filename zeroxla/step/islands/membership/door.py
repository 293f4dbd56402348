"""`Door`: listens at an address, and lets in who knows the token."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from zeroxla.mesh.processes.address import address_of
from zeroxla.step.islands.membership.frames import FrameError, greet

_GREETING_S = 10.0
"""Seconds for a greeting; then the connection is closed."""
_MAX_GREETINGS = 64
"""Greetings at a time; more callers wait."""


class Door:
    """Listens until it is closed. Each caller has a thread, so one who says nothing holds up
    nobody.

    Args:
      host: the address to listen at.
      port: the port; 0 takes a free one.
      token: the secret of the run.
      member: the number of this end.
      enter: is called in the caller's thread with the connection, the caller's number and the
        connection's key; when it returns, the connection is closed.

    Attributes:
      port: the port.

    Raises:
      ValueError: the address cannot be listened at, or the token is empty.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        member: int,
        enter: Callable[[socket.socket, int, bytes], None],
    ) -> None:
        check_token(token)
        self._token, self._member, self._enter = token, member, enter
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            told = getattr(error, "strerror", None) or error
            raise ValueError(
                f"cannot listen at {address_of(host, port)} ({told}); give an address of this "
                "host, with a free port"
            ) from error
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True, name="zeroxla-door").start()

    def close(self) -> None:
        """Let in nobody any more, and close all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        hang_up(self._server)
        for connection in connections:
            hang_up(connection)

    def _listen(self) -> None:
        while True:
            self._greetings.acquire()
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    hang_up(connection)
                    return
                self._connections.add(connection)
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        try:
            try:
                connection.settimeout(_GREETING_S)
                other, key = greet(connection, self._token, self._member, calls=False)
            finally:
                self._greetings.release()
            prepare(connection)
            self._enter(connection, other, key)
        except (OSError, FrameError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            hang_up(connection)


def call(
    host: str, port: int, token: str, member: int, *, timeout: float
) -> tuple[socket.socket, int, bytes]:
    """Connect to somebody who listens, and greet.

    Returns:
      The connection, the other end's number, and the connection's key.

    Raises:
      OSError: nobody answers.
      FrameError: the other end has another token.
    """
    connection = socket.create_connection((host, port), timeout=timeout)
    try:
        connection.settimeout(min(timeout, _GREETING_S))
        other, key = greet(connection, token, member, calls=True)
    except BaseException:
        connection.close()
        raise
    prepare(connection)
    return connection, other, key


def prepare(connection: socket.socket) -> None:
    """Set a connection to wait without limit, and to send short frames at once."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def hang_up(connection: socket.socket) -> None:
    """Close a connection that another thread may use."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def check_token(token: str) -> None:
    """Check that a token is not empty.

    Raises:
      ValueError: it is.
    """
    if not token:
        raise ValueError(
            "the islands' token is empty, and everybody could join; pass a random text, the same "
            "to all islands and to the coordinator"
        )
