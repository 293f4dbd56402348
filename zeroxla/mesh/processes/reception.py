"""`receive`: process 0's side of the meeting. Nothing that a guest sends or omits can end it.

All guests are served at once, by one loop. One that is slow, idle or no member at all is dropped
with a line in the log, and the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import logging
import selectors
import socket
import struct
import time
from typing import Any

from zeroxla.mesh.processes.environment import TOKEN
from zeroxla.mesh.processes.exchange import differences
from zeroxla.mesh.processes.greeting import (
    MAX_LINE_BYTES,
    PROOF_BYTES,
    GreetingError,
    Member,
    from_line,
    is_proof,
    new_challenge,
)

# Seconds that a guest may take to greet, and all of them to hear the verdict.
PATIENCE = 10.0
# Guests at once that have not greeted yet, besides the members; the oldest goes first.
_MAX_GUESTS = 512
_MAX_LOGGED = 20
_log = logging.getLogger(__name__)


def listening_address(host: str) -> str:
    """Return the address of this machine on which process 0 listens; "" stands for all.

    That is the coordinator's own address. But a host's name may stand for a loopback address on
    that host itself, or for an address that a router translates, and others come from outside. So
    these are heard on all addresses.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        return ""
    address = str(found[4][0])
    try:
        named = ipaddress.ip_address(host).is_loopback
    except ValueError:
        named = host == "localhost"
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and not named:
        return ""
    with socket.socket(found[0], socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0, *found[4][2:]))
        except OSError:  # not an address of this machine
            return ""
    return address


def receive(me: Member, host: str, port: int, token: str, timeout: float) -> list[Member]:
    """Wait for all other processes, and give all of them the same list or the same error.

    Args:
      me: process 0.
      host: the coordinator's.
      port: the coordinator's.
      token: the secret that the processes of the run share; "" if they have none.
      timeout: seconds to wait for the others.

    Raises:
      ValueError: the address is taken, or the processes do not run the same.
      TimeoutError: some processes did not come.
    """
    deadline = time.monotonic() + timeout
    with contextlib.closing(_Reception(me, host, port, token)) as reception:
        reception.serve(deadline)
        members = [member for _, member in sorted(reception.members.items())]
        error: Exception | None = None
        if len(members) < me.num_processes:
            missing = [str(i) for i in range(me.num_processes) if i not in reception.members]
            error = TimeoutError(
                f"{len(missing)} of {me.num_processes} processes did not come to {host}:{port} "
                f"within {timeout:.0f} s: {', '.join(missing)}; see what they print"
                + "".join(f"\n  refused: {text}" for text in reception.refused)
            )
        elif lines := differences([member.runs for member in members]):
            error = ValueError(
                "processes do not run the same; install the same code and versions on all "
                f"hosts\n{lines}"
            )
        reception.dismiss(
            {"error": str(error)}
            if error
            else {"members": [dataclasses.asdict(x) for x in members]}
        )
    if error:
        raise error
    return members


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection: who is there, since when, and what it has said so far."""

    socket: socket.socket
    name: str
    since: float
    challenge: bytes
    said: bytearray = dataclasses.field(default_factory=bytearray)
    proved: bool = False
    member: Member | None = None


class _Reception:
    def __init__(self, me: Member, host: str, port: int, token: str) -> None:
        self.members = {me.process_id: me}
        self.refused: list[str] = []
        self._size, self._token, self._num_dropped = me.num_processes, token, 0
        self._guests: dict[_Guest, None] = {}  # in the order in which they came
        self._server = _listen(host, port)
        address = ipaddress.ip_address(str(self._server.getsockname()[0]).partition("%")[0])
        if not token and not address.is_loopback:
            _log.warning(
                "the processes of this run share no token: whoever reaches port %d of this machine "
                "may take the place of one. Set %s to the same random text in all of them",
                port,
                TOKEN,
            )
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def serve(self, deadline: float) -> None:
        """Serve guests until all members are there, or the deadline is over."""
        while len(self.members) < self._size and (now := time.monotonic()) < deadline:
            for key, _ in self._selector.select(min(0.5, deadline - now)):
                if key.data is None:
                    self._admit()
                elif key.data in self._guests:
                    self._hear(key.data)
            waiting = [guest for guest in self._guests if guest.member is None]
            for number, guest in enumerate(waiting):
                late = time.monotonic() - guest.since > PATIENCE
                if late or len(waiting) - number > _MAX_GUESTS + self._size:
                    self._drop(guest, f"no whole greeting, {len(guest.said)} bytes of one")

    def dismiss(self, verdict: dict[str, Any]) -> None:
        """Tell the members the verdict, and leave the port to JAX."""
        self._selector.unregister(self._server)
        self._server.close()
        until = time.monotonic() + PATIENCE
        members = [guest for guest in self._guests if guest.member is not None]
        for guest in members:
            _send(guest.socket, verdict, until)
        for guest in members:  # the side that closes first blocks its port for a while: let guests
            with contextlib.suppress(OSError):
                guest.socket.settimeout(max(0.1, until - time.monotonic()))
                guest.socket.recv(1)

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        self._server.close()
        for guest in self._guests:
            guest.socket.close()
        if self._num_dropped > _MAX_LOGGED:
            _log.warning("the meeting dropped %d connections in all", self._num_dropped)

    def _admit(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError as error:
            oldest = next((guest for guest in self._guests if guest.member is None), None)
            if error.errno in (errno.EMFILE, errno.ENFILE) and oldest is not None:
                self._drop(oldest, "it makes room for another")
            return  # or the new one has gone again
        connection.setblocking(False)
        guest = _Guest(connection, f"{address[0]}:{address[1]}", time.monotonic(), new_challenge())
        self._guests[guest] = None
        self._selector.register(connection, selectors.EVENT_READ, guest)
        try:
            connection.sendall(guest.challenge)
        except OSError as error:
            self._drop(guest, f"it left ({error.strerror})")

    def _hear(self, guest: _Guest) -> None:
        try:
            # Nothing but the proof is read before it is checked.
            part = guest.socket.recv(65536 if guest.proved else PROOF_BYTES - len(guest.said))
        except BlockingIOError:
            return
        except OSError as error:
            return self._drop(guest, f"it left ({error.strerror})")
        if not part or guest.member is not None:
            return self._drop(guest, "it left" if not part else "it said more than a greeting")
        guest.said += part
        if not guest.proved and len(guest.said) >= PROOF_BYTES:
            guest.proved = is_proof(self._token, guest.challenge, bytes(guest.said[:PROOF_BYTES]))
            if not guest.proved:
                return self._drop(guest, "it does not have the run's token")
        line = bytes(guest.said[PROOF_BYTES:])
        if len(line) > MAX_LINE_BYTES:
            return self._drop(guest, f"its greeting has more than {MAX_LINE_BYTES} bytes")
        if b"\n" in line:
            self._take(guest, line)

    def _take(self, guest: _Guest, line: bytes) -> None:
        try:
            member = from_line(line, self._size)
            if member.process_id in self.members:
                raise GreetingError(
                    f"two processes say that they are process {member.process_id} of "
                    f"{self._size}; give each another process_id",
                    belongs=True,
                )
        except GreetingError as error:
            if error.belongs:
                self.refused.append(str(error))
                _send(guest.socket, {"error": str(error)}, time.monotonic())
            self._drop(guest, str(error), abruptly=not error.belongs)
        else:
            guest.member = self.members[member.process_id] = member

    def _drop(self, guest: _Guest, why: str, *, abruptly: bool = True) -> None:
        self._num_dropped += 1
        if self._num_dropped <= _MAX_LOGGED:
            _log.warning("the meeting dropped a connection from %s: %s", guest.name, why)
        if guest.member is not None:
            del self.members[guest.member.process_id]
        del self._guests[guest]
        self._selector.unregister(guest.socket)
        if abruptly:  # a connection that is closed in order would block the port for a while
            with contextlib.suppress(OSError):
                guest.socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        guest.socket.close()


def _listen(host: str, port: int) -> socket.socket:
    address = listening_address(host)
    try:
        if ":" in address:
            return socket.create_server((address, port), family=socket.AF_INET6, backlog=1024)
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server((address, port), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of the coordinator {host}:{port} is in use on this machine, perhaps "
                "by an earlier run; end that, or choose another port"
            ) from error
        raise ValueError(
            f"cannot listen at the coordinator's {host}:{port} ({error.strerror}); choose another "
            "port"
        ) from error


def _send(connection: socket.socket, value: dict[str, Any], until: float) -> None:
    with contextlib.suppress(OSError):  # a process that is gone has printed why it ended
        connection.settimeout(max(0.1, until - time.monotonic()))
        connection.sendall(json.dumps(value).encode() + b"\n")
