"""Addresses of processes as text: "host:port"."""

from __future__ import annotations


def split_address(address: str, *, least: int = 1) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port". The port is at least `least`.

    Raises:
      ValueError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not least <= int(port) < 2**16:
        raise ValueError(f'coordinator={address!r} is not an address; give "host:port"')
    return host, int(port)


def address_of(host: str, port: int) -> str:
    """Return "host:port", or "[host]:port" for an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
