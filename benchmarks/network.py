"""Two hosts on one machine, joined by a link whose rate is set and whose bytes are counted.

A host is a process that waits, in namespaces of its own (network, host name, mounts, processes),
and what is run beside it. The two are joined by a pair of virtual Ethernet devices. Nothing of this
has a name on the machine or a file: when the waiting process ends, and it ends with the program
that made it, however that ends, the kernel removes the host's processes, its devices and the link.

Needs Linux, root, and the commands unshare, nsenter, ip and tc.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_COMMANDS = ("unshare", "nsenter", "ip", "tc")
_DEVICE = "eth0"


class NetworkError(RuntimeError):
    """A command that builds the network failed."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the two hosts.

    Attributes:
      name: what `hostname` prints there; both hosts can resolve it.
      address: its IPv4 address on the link.
      pid: of the process that waits there.
    """

    name: str
    address: str
    pid: int

    def popen(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program there, with this process' environment and `env`.

        It is a child of `nsenter`, in the host's own space of processes: a signal to what is
        returned does not reach it. It ends with the host.
        """
        command = ["nsenter", "--target", str(self.pid)]
        command += ["--net", "--uts", "--mount", "--pid", "--", *argv]
        return subprocess.Popen(command, env={**os.environ, **(env or {})}, **options)

    def sent_bytes(self) -> int:
        """Return what the host has sent over the link so far, framing included."""
        return sent_bytes(str(self.pid))

    def set_rate(self, rate: str | None, burst: str = "256kb") -> None:
        """Bound the rate at which the host sends.

        Args:
          rate: of `tc`, "100mbit" for example; None for no bound.
          burst: how much passes at once after a pause. On a slow link take less: 256 kB are two
            seconds of 1 Mbit/s.
        """
        with contextlib.suppress(NetworkError):  # there is none before the first bound
            self._run("tc", "qdisc", "del", "dev", _DEVICE, "root")
        if rate is not None:
            bucket = ("tbf", "rate", rate, "burst", burst, "latency", "400ms")
            self._run("tc", "qdisc", "add", "dev", _DEVICE, "root", *bucket)

    def set_link(self, up: bool) -> None:
        """Pull the cable out, or plug it in again."""
        self._run("ip", "link", "set", _DEVICE, "up" if up else "down")

    def _run(self, *command: str) -> str:
        # Outside of the host's space of processes: `ip` finds the other host by its number here.
        return run_command(
            "nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", *command
        )


def sent_bytes(process: str = "self") -> int:
    """Return what the host of a process has sent over the link so far, framing included."""
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _DEVICE:
            return int(counters.split()[8])
    raise NetworkError(f"process {process} has no device {_DEVICE}: it is on none of the two hosts")


def missing() -> str | None:
    """Return why this machine cannot have the two hosts; None if it can."""
    absent = [name for name in _COMMANDS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    try:
        run_command("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true")
    except NetworkError as error:
        return str(error)
    return None


@contextlib.contextmanager
def two_hosts(rate: str | None = None) -> Iterator[tuple[Host, Host]]:
    """While inside, there are two hosts; after it, they and all that ran there are gone.

    Args:
      rate: of the link, each way, see `Host.set_rate`.

    Raises:
      NetworkError: they cannot be made here.
    """
    if why := missing():
        raise NetworkError(f"cannot make two hosts: {why}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = [
            Host(f"host{i}", f"10.77.0.{i + 1}", stack.enter_context(waiting_process()))
            for i in (0, 1)
        ]
        names = "".join(f"{host.address} {host.name}\n" for host in hosts)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        peer = ("peer", "name", _DEVICE, "netns", str(hosts[1].pid))
        hosts[0]._run("ip", "link", "add", _DEVICE, "type", "veth", *peer)
        for host in hosts:
            host._run("hostname", host.name)
            host._run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
            host._run("ip", "address", "add", f"{host.address}/24", "dev", _DEVICE)
            host._run("ip", "link", "set", "lo", "up")
            host.set_link(up=True)
            host.set_rate(rate)
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def waiting_process() -> Iterator[int]:
    """Start a process in new namespaces that ends with this one; yield its number."""
    # It reads a pipe that nobody writes to: the pipe closes with this process.
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "cat"]
    outer = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield _only_child(outer)
    finally:
        assert outer.stdin is not None
        outer.stdin.close()
        outer.wait()


def _only_child(outer: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    while outer.poll() is None:
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "cat":
                return int(child)
    raise NetworkError(f"unshare ended with {outer.returncode}")


def run_command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
