"""`make_ranks`: the processes that a launch starts, their hosts and their environments."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence

from zeroxla.cli.launch import child
from zeroxla.cli.launch.hostfile import Host, read_hostfile
from zeroxla.cli.launch.options import ProcessOptions
from zeroxla.mesh.pool import pool_threads
from zeroxla.mesh.processes.environment import (
    COORDINATOR,
    FAREWELL,
    HEARTBEAT,
    NODE,
    NUM_PROCESSES,
    PROCESS_ID,
    RESTART,
    SIMULATED_DEVICES,
    STARTED,
    TOKEN,
)
from zeroxla.program.hosts import visible_gpus

DEFAULT_PORT = 29400
_SIMULATED = 8
# Variables that are passed on to other hosts: JAX, XLA, NCCL and Python read them.
_PASSED_ON = ("CUDA_", "JAX_", "LD_LIBRARY_PATH", "NCCL_", "NPROC", "PATH", "PYTHON", "TF_", "XLA_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """A process to start.

    Attributes:
      number: the number of the process in the run.
      host: a name of its host, for messages.
      command: the command that starts `child.py` there.
      env: the environment variables of this process.
      label: what stands before each line that it prints.
    """

    number: int
    host: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What a group of processes has beside other groups on this machine.

    Attributes:
      name: stands before the lines of its processes, such as "island 1"; "" if it is alone.
      index, count: it has part `index` of `count` of this machine's devices.
      env: environment variables that only its processes have. They travel with the orders, on no
        command line.
    """

    name: str = ""
    index: int = 0
    count: int = 1
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def label(self, number: int, size: int) -> str:
        """Return the label of process `number` of `size`."""
        if not self.name:
            return f"{number:>{len(str(size - 1))}}"
        return self.name if size == 1 else f"{self.name}, node {number}"


ALONE = Share()
"""The share of processes that have the machine to themselves."""


def make_ranks(options: ProcessOptions, restart: int, share: Share = ALONE) -> list[Rank]:
    """Return the processes of an attempt, one for each node.

    Raises:
      ValueError: the host file cannot be used, or contradicts the options.
    """
    if options.hostfile is None:
        ranks = _local(options, restart, share)
    else:
        ranks = _remote(options, read_hostfile(options.hostfile), restart)
    token = secrets.token_hex(32)  # goes to the hosts with their orders, on no command line
    return [
        dataclasses.replace(
            rank,
            env={**rank.env, **share.env, TOKEN: token},
            label=share.label(rank.number, len(ranks)),
        )
        for rank in ranks
    ]


def _local(options: ProcessOptions, restart: int, share: Share) -> list[Rank]:
    nodes = options.nodes or 1
    port = options.port or free_port()
    if options.port is not None and restart == 0:
        check_free(port)
    command = (sys.executable, child.__file__)
    gpus, every = visible_gpus(), nodes * share.count
    size = options.devices_per_node or len(gpus) // every
    if gpus and not 0 < size * every <= len(gpus):
        islands = f"{share.count} islands of " if share.count > 1 else ""
        raise ValueError(
            f"{islands}{nodes} nodes of {max(size, 1)} devices and this machine shows {len(gpus)} "
            "GPUs; ask for fewer"
        )
    ranks = []
    for i in range(nodes):
        env = _told(options, i, nodes, f"127.0.0.1:{port}", restart, share.count)
        if gpus:
            first = (share.index * nodes + i) * size
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + size])
        ranks.append(Rank(number=i, host="this host", command=command, env=env))
    return ranks


def _remote(options: ProcessOptions, hosts: Sequence[Host], restart: int) -> list[Rank]:
    if options.nodes is not None:
        if options.nodes > len(hosts):
            raise ValueError(
                f"--nodes {options.nodes} and {options.hostfile} names {len(hosts)} hosts; ask for "
                "fewer, or add hosts"
            )
        hosts = hosts[: options.nodes]
    slots = options.devices_per_node or hosts[0].slots
    options = dataclasses.replace(options, devices_per_node=slots)
    # The same port at every attempt: nobody here can tell which are free there.
    coordinator = f"{hosts[0].address}:{options.port or DEFAULT_PORT}"
    passed_on = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
    passed_on |= {name: os.environ[name] for name in options.export if name in os.environ}
    program = shlex.join([sys.executable, child.__file__])
    ranks = []
    for i, host in enumerate(hosts):
        env = passed_on | _told(options, i, len(hosts), coordinator, restart)
        if slots is not None and "CUDA_VISIBLE_DEVICES" not in passed_on:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(slots)))
        command = (*shlex.split(options.ssh), host.name, program)
        ranks.append(Rank(number=i, host=host.name, command=command, env=env))
    return ranks


def _told(
    options: ProcessOptions, i: int, nodes: int, coordinator: str, restart: int, shares: int = 1
) -> dict[str, str]:
    devices = options.devices_per_node or max(1, _SIMULATED // (nodes * shares))
    return {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(nodes),
        PROCESS_ID: str(i),
        NODE: f"node {i}",
        SIMULATED_DEVICES: str(devices),
        HEARTBEAT: str(options.heartbeat),
        FAREWELL: str(options.farewell),
        RESTART: str(restart),
        STARTED: options.started,
        "NPROC": os.environ.get("NPROC", str(pool_threads(devices))),
        "PYTHONUNBUFFERED": "1",
    }


def check_free(port: int) -> None:
    """Check that nobody listens on a TCP port of this machine.

    Raises:
      ValueError: somebody does, or the port may not be used.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"--port {port}: {error.strerror}; name another, or leave it out for a free one"
            ) from error


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
