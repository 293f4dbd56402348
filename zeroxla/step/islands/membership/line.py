"""`Line`: sends the newest message on a connection, and signs of life while there is none."""

from __future__ import annotations

import socket
import threading

from zeroxla.step.islands.membership.door import hang_up
from zeroxla.step.islands.membership.frames import FrameReader, FrameWriter

MESSAGE, ALIVE = "message", "alive"


def beat_of(deadline: float) -> float:
    """Return the seconds between two signs of life."""
    return min(max(deadline / 5, 0.05), 5.0)


class Line:
    """Sends in a thread of its own. A message that is not sent yet when a newer one comes never is.

    Args:
      connection: the connection.
      key: its key.
      member: the number of this end.
      beat: seconds between two signs of life.
    """

    def __init__(self, connection: socket.socket, key: bytes, member: int, beat: float) -> None:
        self._connection, self._writer = connection, FrameWriter(connection, key, member)
        self._beat, self._message, self._closed = beat, b"", False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._send, daemon=True, name="zeroxla-line")
        self._thread.start()

    def tell(self, message: bytes) -> None:
        """Send a message as soon as the connection takes it."""
        with self._change:
            self._message = message
            self._change.notify()

    @property
    def has_ended(self) -> bool:
        """Whether the connection was closed."""
        return self._closed

    def set_beat(self, beat: float) -> None:
        """Change the seconds between two signs of life."""
        with self._change:
            self._beat = beat
            self._change.notify()

    def close(self) -> None:
        """Send nothing any more, and hang up."""
        with self._change:
            self._closed = True
            self._change.notify()
        hang_up(self._connection)

    def _send(self) -> None:
        try:
            while True:
                with self._change:
                    if not self._message and not self._closed:
                        self._change.wait(self._beat)
                    if self._closed:
                        return
                    message, self._message = self._message, b""
                self._writer.write(MESSAGE if message else ALIVE, message)
        except OSError:
            hang_up(self._connection)


def next_message(reader: FrameReader) -> bytes:
    """Return the next message, past signs of life.

    Raises:
      OSError, FrameError: as the reader does.
    """
    while True:
        name, body = reader.read()
        if name == MESSAGE:
            return body
