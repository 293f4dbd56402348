"""`meet`: the processes of a run meet before JAX starts, so that errors are reported in words.

JAX's own start-up ends the process if another one does not come, or if its port is taken. So every
process first connects to process 0, at the coordinator's address, and tells who it is and what it
runs. Process 0 answers all of them with the same list or the same error, and leaves the port to
JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import socket
import time
from collections.abc import Sequence
from typing import Any

from zeroxla.mesh.processes.exchange import differences

_GREETING = "zeroxla meeting 1"
_MAX_BYTES = 1 << 20
# Seconds that a process may take to send its line once it is connected, and to hear the verdict.
_PATIENCE = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A process of a run, as it describes itself.

    Attributes:
      process_id: its number, from 0.
      num_processes: the number of processes that it was told.
      node: its host's name. Processes with the same name share a node.
      runs: its `fingerprint`: versions and hashes of code, which must be the same everywhere.
    """

    process_id: int
    num_processes: int
    node: str
    runs: dict[str, str]


def meet(me: Member, coordinator: str, *, timeout: float) -> list[Member]:
    """Wait until all processes have come, and return them in the order of their numbers.

    Args:
      me: this process.
      coordinator: "host:port"; process 0 listens there.
      timeout: seconds to wait for the other processes.

    Raises:
      ValueError: the address is malformed or taken, or the processes do not fit together.
      TimeoutError: some processes did not come.
    """
    host, port = split_address(coordinator)
    deadline = time.monotonic() + timeout
    if me.process_id == 0:
        return _receive(me, host, port, deadline, timeout)
    return _report(me, host, port, deadline, timeout)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port".

    Raises:
      ValueError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f'coordinator={address!r} is not an address; give "host:port"')
    return host, int(port)


# ------------------------------------------------------------------ process 0


def _receive(me: Member, host: str, port: int, deadline: float, timeout: float) -> list[Member]:
    members, error = {0: me}, None
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(host, port))
        guests = []
        while error is None and len(members) < me.num_processes:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                guest = stack.enter_context(server.accept()[0])
            except (TimeoutError, BlockingIOError):
                missing = [str(i) for i in range(me.num_processes) if i not in members]
                error = TimeoutError(
                    f"{len(missing)} of {me.num_processes} processes did not come to {host}:{port} "
                    f"within {timeout:.0f} s: {', '.join(missing)}; see what they print"
                )
                break
            member = _hear(guest)
            if member is None:
                continue  # a stranger, such as a port scanner
            guests.append(guest)
            if member.process_id in members:
                error = ValueError(
                    f"two processes say that they are process {member.process_id} of "
                    f"{me.num_processes}; give each another process_id"
                )
            members[member.process_id] = member
            error = error or _misfit(me, member)
        server.close()  # JAX's own server takes the port next
        found = [members[i] for i in sorted(members)]
        error = error or _differences(found)
        for guest in guests:
            _send(guest, {"error": str(error)} if error else {"members": [*map(vars, found)]})
        for guest in guests:  # the side that closes first blocks its port for a while: let guests
            with contextlib.suppress(OSError):
                guest.recv(1)
    if error:
        raise error
    return found


def _listen(host: str, port: int) -> socket.socket:
    try:
        # Listen at all addresses of this machine, as JAX will.
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", port), backlog=1024)
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


def _hear(guest: socket.socket) -> Member | None:
    said = _read(guest, time.monotonic() + _PATIENCE)
    if not isinstance(said, dict) or said.pop("greeting", None) != _GREETING:
        return None
    return Member(**said)


def _misfit(me: Member, member: Member) -> ValueError | None:
    if member.num_processes != me.num_processes:
        return ValueError(
            f"process {member.process_id} was told of {member.num_processes} processes and process "
            f"0 of {me.num_processes}; give all the same number"
        )
    return None


def _differences(members: Sequence[Member]) -> ValueError | None:
    lines = differences([member.runs for member in members])
    if not lines:
        return None
    return ValueError(
        f"processes do not run the same; install the same code and versions on all hosts\n{lines}"
    )


# ------------------------------------------------------------------ the others


def _report(me: Member, host: str, port: int, deadline: float, timeout: float) -> list[Member]:
    with _connect(host, port, deadline, timeout) as connection:
        _send(connection, {"greeting": _GREETING, **vars(me)})
        verdict = _read(connection, deadline + _PATIENCE)
    if not isinstance(verdict, dict) or not verdict.keys() & {"error", "members"}:
        raise TimeoutError(
            f"who listens at the coordinator's {host}:{port} gave no verdict: process 0 has ended, "
            "or it is another program; see what process 0 prints"
        )
    if "error" in verdict:
        raise ValueError(verdict["error"])
    return [Member(**said) for said in verdict["members"]]


def _connect(host: str, port: int, deadline: float, timeout: float) -> socket.socket:
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            return socket.create_connection((host, port), timeout=left)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"process 0 was not to be reached at {host}:{port} within {timeout:.0f} s "
                    f"({error.strerror or error}); correct the coordinator's address, or see why "
                    "process 0 did not start there"
                ) from error
        time.sleep(0.2)


# ------------------------------------------------------------------ lines of JSON


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a process that is gone has printed why it ended
        connection.sendall(json.dumps(value).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> Any:
    """Return the JSON value of one line; None if no line came, or it is not JSON."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _MAX_BYTES:
        try:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            part = connection.recv(65536)
        except OSError:
            return None
        if not part:
            return None
        line += part
    with contextlib.suppress(ValueError):
        return json.loads(line)
    return None
