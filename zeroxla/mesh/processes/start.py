"""`initialize`: starts `jax.distributed` in a run of several processes, with readable errors."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Sequence

import jax

from zeroxla.mesh.processes.address import address_of, split_address
from zeroxla.mesh.processes.ending import Ending
from zeroxla.mesh.processes.environment import (
    FAREWELL,
    HEARTBEAT,
    NODE,
    SIMULATED_DEVICES,
    Cluster,
    find_cluster,
    find_token,
)
from zeroxla.mesh.processes.exchange import exchange
from zeroxla.mesh.processes.fingerprint import fingerprint
from zeroxla.mesh.processes.greeting import Member
from zeroxla.mesh.processes.meeting import meet
from zeroxla.mesh.processes.reception import listening_address
from zeroxla.mesh.simulate import simulate
from zeroxla.program import compat
from zeroxla.program.hosts import allocated_gpus, place_on_host, visible_gpus

# Of every process its node, the GPUs that it sees, and those that the run has there, once they have
# met.
_hosts: list[tuple[str, list[str], int]] | None = None


def initialize(
    coordinator: str | None = None,
    *,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
    heartbeat_timeout: float | None = None,
    farewell_timeout: float | None = None,
) -> None:
    """Join this process to the others of its run. Call it first thing in the program.

    A process that was started by `zeroxla launch`, in a Slurm step, by Open MPI or in an indexed
    Kubernetes Job needs no argument. In a process that was started alone, and at a second call,
    this does nothing.

    Processes on one host share a node of `make_mesh`. Hosts are told apart by their names, or by
    the names that `zeroxla launch` and Slurm give them.

    A process that is alone on its host takes all devices of the host. Several on a host share out
    the GPUs that all of them see: each takes one if there are as many processes as GPUs, or as many
    as come out even. Where the cluster has shared out the GPUs, each process takes those that it
    sees.

    Args:
      coordinator: "host:port" of process 0, which listens there; the port must be free.
      num_processes: number of processes in the run.
      process_id: number of this process, from 0.
      timeout: seconds to wait for all processes to come.
      heartbeat_timeout: seconds of silence after which a process counts as dead. All others are
        then ended, with a message that names it. None takes the value of `zeroxla launch`, or 30.
      farewell_timeout: seconds in which all processes must end once one has ended. None takes the
        value of `zeroxla launch`, or 5.

    When a process ends with an exception, or before the others, all processes end within seconds.
    Those that are ended say which process failed first, and why.

    Raises:
      ValueError: arguments or the environment's variables are incomplete or contradict each other,
        the coordinator's port is taken, processes run different code or versions, or a host has
        more processes than GPUs.
      TimeoutError: process 0 could not be reached, or processes did not come.
      RuntimeError: JAX has started already.
    """
    global _hosts
    if has_joined():
        return
    cluster = _cluster(coordinator, num_processes, process_id)
    if cluster is None and SIMULATED_DEVICES not in os.environ:
        return
    if compat.backends_started():
        raise RuntimeError(
            "zeroxla.initialize() came after JAX had started; call it first thing in the program"
        )
    if SIMULATED_DEVICES in os.environ:
        simulate(int(os.environ[SIMULATED_DEVICES]), keep_accelerators=True)
    if cluster is None:
        return
    coordinator, num_processes, process_id, _ = compat.cluster_parameters(
        cluster.source, cluster.coordinator, cluster.num_processes, cluster.process_id, timeout
    )
    if heartbeat_timeout is None:
        heartbeat_timeout = float(os.environ.get(HEARTBEAT, 30))
    if farewell_timeout is None:
        farewell_timeout = float(os.environ.get(FAREWELL, 5))
    me = Member(
        process_id=process_id,
        num_processes=num_processes,
        node=_node_here(),
        runs=fingerprint(),
        gpus=visible_gpus(),
        allocated=allocated_gpus(),
    )
    members = meet(me, coordinator, timeout=timeout, token=find_token())
    host, port = split_address(coordinator)
    listens_at = listening_address(host) if process_id == 0 else ""
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=_own_devices(cluster.source, me, members),
        cluster_detection_method="deactivate",
        coordinator_bind_address=address_of(listens_at, port) if listens_at else None,
        initialization_timeout=round(timeout),
        heartbeat_timeout_seconds=round(heartbeat_timeout),
    )
    _hosts = [(member.node, member.gpus, member.allocated) for member in members]
    Ending(process_id, num_processes, farewell_timeout).begin()


def has_joined() -> bool:
    """Return whether this process has joined others. Does not start JAX's devices."""
    return compat.coordination_client() is not None


def nodes_of_processes() -> list[str]:
    """Return the host's name of every process, by process.

    If processes joined JAX by other means than `initialize`, they exchange their hosts' names and
    GPUs here, so all of them must call this.
    """
    return [node for node, _, _ in _all_hosts()]


def gpus_of_hosts() -> dict[str, int]:
    """Return how many GPUs of each host the run's processes see together, or were allocated. All
    processes must call this, as the above."""
    seen: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for node, gpus, allocated in _all_hosts():
        seen.setdefault(node, set()).update(gpus)
        counts[node] = max(counts.get(node, 0), len(seen[node]), allocated)
    return counts


def _all_hosts() -> list[tuple[str, list[str], int]]:
    global _hosts
    if _hosts is None:
        here = [_node_here(), visible_gpus(), allocated_gpus()]
        said = map(json.loads, exchange("host", json.dumps(here)))
        _hosts = [(node, gpus, allocated) for node, gpus, allocated in said]
    return _hosts


def _node_here() -> str:
    # Several of Slurm's nodes may be on one machine, each with devices of its own.
    names = (os.environ.get(name) for name in (NODE, "SLURMD_NODENAME"))
    return next(filter(None, names), None) or socket.gethostname()


def _own_devices(source: str, me: Member, members: Sequence[Member]) -> list[int] | None:
    """Return the devices that this process takes, as `jax.distributed.initialize` has them.

    The cluster's variables come first: they also know hosts that have the same name.
    """
    here = [member for member in members if member.node == me.node]
    place = place_on_host(source) or (here.index(me), len(here))
    others = [member.gpus for member in here if member != me]
    return compat.own_devices(source, me.gpus, *place, others=others)


def _cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Cluster | None:
    """Return the run that the arguments describe, completed by the environment; None for a single
    process."""
    given = {
        name: value
        for name, value in (
            ("coordinator", coordinator),
            ("num_processes", num_processes),
            ("process_id", process_id),
        )
        if value is not None
    }
    if num_processes is not None and process_id is not None:
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id={process_id} of num_processes={num_processes}; they count from 0"
            )
        if num_processes == 1:
            return None
    if len(given) == 3:
        return Cluster(source="arguments", **given)  # pyright: ignore[reportArgumentType]
    found = find_cluster()
    if found is not None:
        return dataclasses.replace(found, **given)
    if given:
        missing = [n for n in ("coordinator", "num_processes", "process_id") if n not in given]
        raise ValueError(
            f"zeroxla.initialize was given {', '.join(given)}, and neither {' nor '.join(missing)} "
            "is known from the environment; pass all three, or none for a single process"
        )
    return None
