"""Any number of hosts on one machine, joined by a switch whose cables can be pulled out.

A host is a network namespace that ends with this program, as in network.py. The switch is a bridge
in a namespace of its own. When a cable is pulled out there, the other end notices nothing, so
nobody is told that a host is gone. Needs what network.py needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from network import Host, NetworkError, missing, run_command, waiting_process

_BRIDGE, _DEVICE = "br0", "eth0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts that are joined by a switch.

    Attributes:
      hosts: the hosts.
      switch: the process that waits in the switch's namespace.
    """

    hosts: tuple[Host, ...]
    switch: int

    def set_cable(self, index: int, *, up: bool) -> None:
        """Pull a host's cable out at the switch, or plug it in again."""
        _in(self.switch, "ip", "link", "set", f"port{index}", "up" if up else "down")

    def popen(
        self,
        index: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host's network; what is returned is the program, so signals reach
        it. It does not end with the host."""
        inside = ["nsenter", "--target", str(self.hosts[index].pid), "--net", "--uts", "--", *argv]
        return subprocess.Popen(inside, env={**os.environ, **(env or {})}, **options)


@contextlib.contextmanager
def switched(num: int, rate: str | None = None) -> Iterator[Network]:
    """While inside, there are so many hosts; after it, they are gone.

    Args:
      num: the number of hosts.
      rate: how fast each sends, see `Host.set_rate`.

    Raises:
      NetworkError: they cannot be made here.
    """
    if why := missing():
        raise NetworkError(f"cannot make hosts: {why}")
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(waiting_process())
        _in(switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
        _in(switch, "ip", "link", "set", _BRIDGE, "up")
        hosts = []
        for i in range(num):
            host = Host(f"host{i}", f"10.78.0.{i + 1}", stack.enter_context(waiting_process()))
            port, peer = f"port{i}", ("peer", "name", _DEVICE, "netns", str(host.pid))
            _in(switch, "ip", "link", "add", port, "type", "veth", *peer)
            _in(switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
            _in(host.pid, "hostname", host.name)
            _in(host.pid, "ip", "address", "add", f"{host.address}/24", "dev", _DEVICE)
            _in(host.pid, "ip", "link", "set", "lo", "up")
            host.set_link(up=True)
            host.set_rate(rate)
            hosts.append(host)
        yield Network(hosts=tuple(hosts), switch=switch)


def _in(process: int, *command: str) -> None:
    """Run a command in the namespaces of a process; the machine's processes stay visible."""
    run_command("nsenter", "--target", str(process), "--net", "--uts", "--", *command)
