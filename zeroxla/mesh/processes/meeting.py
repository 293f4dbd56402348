"""`meet`: the processes of a run meet before JAX starts, so that errors are reported in words.

JAX's own start-up ends the process if another one does not come, or if its port is taken. So every
process first connects to process 0, at the coordinator's address, and tells who it is and what it
runs. Process 0 answers all of them with the same list or the same error, and leaves the port to
JAX.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from zeroxla.mesh.processes.address import split_address
from zeroxla.mesh.processes.environment import TOKEN
from zeroxla.mesh.processes.greeting import (
    CHALLENGE_BYTES,
    GreetingError,
    Member,
    prove,
    read_json,
    to_line,
    to_member,
)
from zeroxla.mesh.processes.reception import PATIENCE, receive

_MAX_VERDICT_BYTES = 1 << 26


def meet(me: Member, coordinator: str, *, timeout: float, token: str = "") -> list[Member]:
    """Wait until all processes have come, and return them in the order of their numbers.

    Args:
      me: this process.
      coordinator: "host:port"; process 0 listens there.
      timeout: seconds to wait for the other processes.
      token: the secret that the processes of the run share; "" if they have none.

    Raises:
      ValueError: the address is malformed or taken, or the processes do not fit together.
      TimeoutError: some processes did not come.
    """
    host, port = split_address(coordinator)
    if me.process_id == 0:
        return receive(me, host, port, token, timeout)
    return _report(me, host, port, token, timeout)


def _report(me: Member, host: str, port: int, token: str, timeout: float) -> list[Member]:
    deadline = time.monotonic() + timeout
    verdict: Any = None
    with _connect(host, port, deadline, timeout) as connection:
        challenge = _read(connection, deadline, lambda said: len(said) >= CHALLENGE_BYTES)
        if len(challenge) == CHALLENGE_BYTES:
            try:
                connection.sendall(prove(token, challenge) + to_line(me))
            except OSError:
                pass  # it has left; so there is no verdict
            else:
                verdict = read_json(_read(connection, deadline + PATIENCE, _is_line))
    if isinstance(verdict, dict) and "error" in verdict:
        raise ValueError(verdict["error"])
    try:
        return [to_member(said) for said in verdict["members"]]
    except (TypeError, KeyError, GreetingError):
        raise TimeoutError(
            f"who listens at the coordinator's {host}:{port} gave no verdict: process 0 has ended, "
            f"it is another program, or it has another {TOKEN}; see what process 0 prints"
        ) from None


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


def _is_line(said: bytearray) -> bool:
    return said.endswith(b"\n") or len(said) > _MAX_VERDICT_BYTES


def _read(
    connection: socket.socket, deadline: float, is_whole: Callable[[bytearray], bool]
) -> bytes:
    """Return what comes until it is whole, the connection ends, or the deadline is over."""
    said = bytearray()
    while not is_whole(said):
        try:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            part = connection.recv(65536)
        except OSError:
            break
        if not part:
            break
        said += part
    return bytes(said)
