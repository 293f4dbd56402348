"""`TcpLink`: joins islands that are processes of their own, over TCP.

Each island listens at an address that the others know. Of two islands the one with the larger
number calls the other. What arrives is read by a thread for each connection, so that two islands
may send to each other at the same time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

from zeroxla.mesh.processes.meeting import address_of, split_address
from zeroxla.step.islands.frames import FrameError, FrameReader, FrameWriter, greet

_GREETING_S = 10.0
"""Seconds for a greeting; then the connection is closed."""
_RETRY_S = 0.2


class TcpLink:
    """An `IslandLink` over TCP; `TcpLink.join` makes it.

    Attributes:
      index: the number of this island.
      num: the number of islands.
      timeout: seconds that an exchange waits for the other islands.
    """

    def __init__(self, index: int, num: int, timeout: float) -> None:
        self.index, self.num, self.timeout = index, num, timeout
        self._writers: dict[int, FrameWriter] = {}
        self._connections: list[socket.socket] = []
        self._arrived: dict[tuple[str, int], bytes] = {}
        self._broken: dict[int, str] = {}
        self._change = threading.Condition()

    @staticmethod
    def join(
        index: int,
        addresses: Sequence[str],
        token: str,
        *,
        timeout: float = 300.0,
        max_bytes: int = 2**33,
    ) -> TcpLink:
        """Join the other islands.

        Args:
          index: the number of this island.
          addresses: where each island listens, "host:port".
          token: a secret that all islands share; it does not travel, and all bytes prove it.
          timeout: seconds to wait for the other islands, here and in each exchange.
          max_bytes: the most bytes that an island sends another one at once.

        Raises:
          ValueError: there is no such island, an address is malformed or cannot be listened at, or
            the token is empty.
          TimeoutError: islands did not come; the message lists them.
        """
        if not 0 <= index < len(addresses):
            raise ValueError(
                f"island {index} of {len(addresses)}; they are 0 to {len(addresses) - 1}"
            )
        if not token:
            raise ValueError(
                "the islands' token is empty, and everybody could join; pass a random text, the "
                "same to all islands"
            )
        link = TcpLink(index, len(addresses), timeout)
        deadline = time.monotonic() + timeout
        places = [split_address(address) for address in addresses]
        with _listening(*places[index]) as server:
            callers = threading.Thread(
                target=link._answer, args=(server, token, max_bytes, deadline), daemon=True
            )
            callers.start()
            for other in range(index):
                link._call(other, *places[other], token, max_bytes, deadline)
            callers.join()
        if missing := sorted(set(range(link.num)) - {index} - link._writers.keys()):
            link.close()
            told = ", ".join(f"{i} at {address_of(*places[i])}" for i in missing)
            raise TimeoutError(
                f"these islands did not come within {timeout:.0f} s, or have another token: {told}"
            )
        return link

    def swap(self, name: str, parts: Sequence[bytes]) -> list[bytes]:
        """See `IslandLink`.

        Raises:
          ConnectionError: an island has left, or cannot be trusted.
          TimeoutError: islands have sent nothing in time.
          ValueError: an island has sent another number of bytes.
        """
        for other, writer in self._writers.items():
            try:
                writer.write(name, parts[other])
            except OSError as error:
                raise ConnectionError(f"island {other} was not to be reached: {error}") from error
        found = list(parts)
        deadline = time.monotonic() + self.timeout
        for other in self._writers:
            found[other] = self._wait(name, other, deadline)
            if len(found[other]) != len(parts[self.index]):
                raise ValueError(
                    f"island {other} sent {len(found[other])} bytes as {name!r}, and "
                    f"{len(parts[self.index])} are due: it has another model or other options"
                )
        return found

    def close(self) -> None:
        """Leave the other islands."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _wait(self, name: str, other: int, deadline: float) -> bytes:
        """Return what an island has sent under a name, when it is there."""

        def is_known() -> bool:
            return (name, other) in self._arrived or other in self._broken

        with self._change:
            if not self._change.wait_for(is_known, max(0.0, deadline - time.monotonic())):
                raise TimeoutError(
                    f"island {other} has not sent {name!r} within {self.timeout:.0f} s"
                )
            if (name, other) not in self._arrived:
                raise ConnectionError(f"island {other} has left: {self._broken[other]}")
            return self._arrived.pop((name, other))

    def _answer(self, server: socket.socket, token: str, max_bytes: int, deadline: float) -> None:
        """Take the calls of islands with larger numbers; runs in a thread."""
        due = set(range(self.index + 1, self.num))
        while due - self._writers.keys() and time.monotonic() < deadline:
            server.settimeout(_RETRY_S)
            with contextlib.suppress(TimeoutError):
                # Each greeting has a thread: a stranger who says nothing holds up nobody.
                threading.Thread(
                    target=self._met,
                    args=(server.accept()[0], token, max_bytes, due),
                    kwargs={"calls": False},
                    daemon=True,
                ).start()

    def _call(
        self, other: int, host: str, port: int, token: str, max_bytes: int, deadline: float
    ) -> None:
        """Call an island with a smaller number, until it answers or the time is over."""
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, port), timeout=left)
                if self._met(connection, token, max_bytes, {other}, calls=True) is not None:
                    return
            time.sleep(_RETRY_S)

    def _met(
        self,
        connection: socket.socket,
        token: str,
        max_bytes: int,
        due: set[int],
        *,
        calls: bool,
    ) -> int | None:
        """Greet on a new connection; return the island's number, None if it is no island that is
        due, and the connection is closed."""
        connection.settimeout(_GREETING_S)
        try:
            other, key = greet(connection, token, self.index, calls=calls)
        except (OSError, FrameError):
            connection.close()
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._change:
            if other not in due or other in self._writers:
                connection.close()
                return None
            self._connections.append(connection)
            self._writers[other] = FrameWriter(connection, key, self.index)
        reader = FrameReader(connection, key, other, max_bytes)
        threading.Thread(target=self._read, args=(other, reader), daemon=True).start()
        return other

    def _read(self, other: int, reader: FrameReader) -> None:
        """Keep what an island sends, until it leaves; runs in a thread."""
        why = ""
        while not why:
            try:
                name, body = reader.read()
            except (OSError, ValueError) as error:
                why = str(error)
            with self._change:
                if why:
                    self._broken[other] = why
                else:
                    self._arrived[name, other] = body
                self._change.notify_all()


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
      ValueError: it cannot.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {address_of(host, port)} ({error.strerror or error}); give each "
            "island an address of its own host, with a free port"
        ) from error
