"""Frames: named bytes on a connection between islands, each with proof of where it comes from.

A frame is a header (lengths of name and body), the name, the body, and their digest under a key of
the connection, with the number of the frame. Nothing of a frame is used before its digest is right.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable

NONCE_BYTES = 32
DIGEST_BYTES = 32
MAX_NAME_BYTES = 256
_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 16
_HEADER = struct.Struct(">IQ")
_NUMBER = struct.Struct(">Q")


class FrameError(ValueError):
    """A connection that cannot be trusted: it is closed."""


def read_exactly(
    connection: socket.socket, num_bytes: int, heard: Callable[[], None] = lambda: None
) -> bytes:
    """Return so many bytes from a connection; call `heard` when some of them have come.

    Raises:
      ConnectionError: it ends before.
    """
    found = bytearray()  # It grows with what comes: a wrong length reserves nothing.
    while len(found) < num_bytes:
        part = connection.recv(min(num_bytes - len(found), _READ_BYTES))
        if not part:
            raise ConnectionError("the connection has ended")
        heard()
        found += part
    return bytes(found)


def greet(connection: socket.socket, token: str, member: int, *, calls: bool) -> tuple[int, bytes]:
    """Prove on a new connection that both ends know the token, and tell each other their numbers.

    Args:
      connection: the connection.
      token: the secret of the run; it does not travel.
      member: the number of this end, of 32 bits.
      calls: whether this end has made the connection.

    Returns:
      The number of the other end, and the connection's key.

    Raises:
      FrameError: the other end does not know the token.
      ConnectionError: it hangs up.
    """
    nonce, number = secrets.token_bytes(NONCE_BYTES), struct.pack(">I", member)
    connection.sendall(nonce + number)
    said = read_exactly(connection, NONCE_BYTES + 4)
    theirs, other = said[:NONCE_BYTES], said[NONCE_BYTES:]
    ends = (nonce + number + said) if calls else (said + nonce + number)
    key = hmac.digest(token.encode(), b"zeroxla islands 2" + ends, hashlib.sha256)
    mine, right = (b"caller", b"called") if calls else (b"called", b"caller")
    connection.sendall(hmac.digest(key, mine + theirs, hashlib.sha256))
    proof = read_exactly(connection, DIGEST_BYTES)
    if not hmac.compare_digest(proof, hmac.digest(key, right + nonce, hashlib.sha256)):
        raise FrameError("the other end has another token")
    return struct.unpack(">I", other)[0], key


class FrameWriter:
    """Writes frames to a connection.

    Args:
      connection: the connection.
      key: the connection's key.
      member: the number of this end.
    """

    def __init__(self, connection: socket.socket, key: bytes, member: int) -> None:
        self._connection, self._key, self._member, self._count = connection, key, member, 0

    def write(self, name: str, body: bytes) -> None:
        """Send a frame. The connection's timeout is one for each piece of it.

        Raises:
          OSError: the connection has ended.
        """
        told = name.encode()
        header = _HEADER.pack(len(told), len(body))
        digest = _digest(self._key, self._member, self._count, header, told, body)
        self._count += 1
        self._connection.sendall(header + told)
        view = memoryview(body)
        for at in range(0, len(body), _WRITE_BYTES):
            self._connection.sendall(view[at : at + _WRITE_BYTES])
        self._connection.sendall(digest)


class FrameReader:
    """Reads frames from a connection.

    Args:
      connection: the connection.
      key: the connection's key.
      member: the number of the other end.
      max_bytes: the most bytes of a body.
      heard: is called when bytes have come.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        member: int,
        max_bytes: int,
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._key, self._member = connection, key, member
        self._max_bytes, self._heard, self._count = max_bytes, heard, 0

    def read(self) -> tuple[str, bytes]:
        """Return the next frame's name and body.

        Raises:
          FrameError: it is too long, or its digest is wrong: bytes were changed on the way.
          ConnectionError: the connection has ended.
        """
        header = read_exactly(self._connection, _HEADER.size)
        name_bytes, body_bytes = _HEADER.unpack(header)
        if name_bytes > MAX_NAME_BYTES or body_bytes > self._max_bytes:
            raise FrameError(f"a frame of {name_bytes} + {body_bytes} bytes is too long")
        name = read_exactly(self._connection, name_bytes)
        body = read_exactly(self._connection, body_bytes, self._heard)
        digest = read_exactly(self._connection, DIGEST_BYTES)
        right = _digest(self._key, self._member, self._count, header, name, body)
        if not hmac.compare_digest(digest, right):
            raise FrameError("the bytes of a frame were changed on the way")
        self._count += 1
        return name.decode(), body


def _digest(key: bytes, member: int, count: int, header: bytes, name: bytes, body: bytes) -> bytes:
    """Return the digest of a frame: of its sender, its number and its bytes."""
    found = hmac.new(key, struct.pack(">I", member) + _NUMBER.pack(count), hashlib.sha256)
    for part in (header, name, body):
        found.update(part)
    return found.digest()
