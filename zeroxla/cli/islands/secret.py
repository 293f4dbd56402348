"""The secret that islands and their coordinator share, for commands that need it."""

from __future__ import annotations

from zeroxla.cli.errors import UsageError
from zeroxla.mesh.processes.environment import (
    ISLANDS_TOKEN,
    ISLANDS_TOKEN_FILE,
    find_islands_token,
)


def needed_token() -> str:
    """Return the islands' secret from the environment.

    Raises:
      UsageError: there is none; it says how to make one.
    """
    try:
        token = find_islands_token()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not token:
        raise UsageError(
            "islands and their coordinator need a secret, and the environment has none; make one "
            f"with `export {ISLANDS_TOKEN}=$(openssl rand -hex 16)`, and set the same on all "
            f"hosts, or set {ISLANDS_TOKEN_FILE} to a file that has it"
        )
    return token


def check_address(name: str, address: str, *, least: int = 1) -> None:
    """Check that a text is an address.

    Args:
      name: the flag, for the message.
      address: "host:port".
      least: the least port.

    Raises:
      ValueError: it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not least <= int(port) < 2**16:
        raise ValueError(f"{name} {address}: give HOST:PORT, such as 10.0.0.1:29500")
