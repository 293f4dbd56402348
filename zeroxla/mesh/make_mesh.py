"""`make_mesh`: makes a mesh whose axes follow the hosts of a run and their devices."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from zeroxla.config.values import whole_number
from zeroxla.mesh.axes import CONTEXT, DEVICE, EXPERT, NODE, PIPE, TENSOR, lengths_beside
from zeroxla.mesh.processes.start import gpus_of_hosts, nodes_of_processes


def make_mesh(
    *,
    nodes: int | None = None,
    devices_per_node: int | None = None,
    pipe: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh with the axes `("node", "device")`, and with an outermost `"pipe"` if there are
    several stages. The axes `expert`, `context` and `tensor` divide the devices of a node, or of
    several nodes, if they are asked for, and come last; `node` and `device` are what they leave for
    data.

    Hosts become the axis `node`, whatever the order of processes, and each gives its first devices.
    With stages, and without `nodes`, hosts become the axis `pipe` first, as stages send each other
    less than nodes do. So on two hosts of 8 devices

        make_mesh()                   node 2 x device 8
        make_mesh(pipe=2)             pipe 2 x node 1 x device 8, a host is a stage
        make_mesh(pipe=4)             pipe 4 x node 1 x device 4, a host is two stages
        make_mesh(pipe=2, nodes=2)    pipe 2 x node 2 x device 4, each host has a part of each stage

    and on four hosts `make_mesh(pipe=2)` is pipe 2 x node 2 x device 8: two hosts are a stage. On
    one host of 8 devices

        make_mesh(tensor=2, context=2)       node 1 x device 2 x context 2 x tensor 2

    and on four such hosts `make_mesh(context=16)` is node 2 x device 1 x context 16: each sequence
    is on two hosts.

    Args:
      nodes: length of the axis `node`. Hosts lie along it as far as they fill it, the rest of them
        along `pipe`. None means the number of hosts in a stage.
      devices_per_node: the number of devices of a node, the length of the axis `device` times
        those of the axes after it, unless these take several nodes. None means that all devices
        are used. They must divide evenly.
      pipe: number of pipeline stages.
      tensor: number of devices that share each product with a leaf: tensor parallelism.
      context: number of devices that share each sequence.
      expert: number of devices that share each bank of experts.
      devices: the devices to take, in this order: `device` runs fastest, then `node`. The first
        pipe * nodes * devices_per_node of them are used. None means all devices, arranged as above.

    Returns:
      A `jax.sharding.Mesh` whose axes are all `AxisType.Auto`. If it leaves devices idle, because
      `devices_per_node` says so, a warning tells how many. So it does if the processes of a run
      take fewer GPUs than their hosts have.

    Raises:
      ValueError: a length is no whole number of 1 or more, there are fewer devices than asked for,
        `devices_per_node` is None and devices do not divide evenly, hosts have different numbers of
        devices, `nodes` is None and hosts and stages do not divide evenly, or tensor x context x
        expert neither divides the devices of a node nor fills nodes.

    >>> make_mesh(nodes=1, devices_per_node=1).axis_names
    ('node', 'device')
    """
    nodes = whole_number("nodes", nodes, 1)
    devices_per_node = whole_number("devices_per_node", devices_per_node, 1)
    pipe = whole_number("pipe", pipe, 1) or 1
    split = {
        name: whole_number(name, length, 1) or 1
        for name, length in ((EXPERT, expert), (CONTEXT, context), (TENSOR, tensor))
    }
    hosts = _by_host(jax.devices() if devices is None else devices)
    if devices is None and jax.process_count() > 1 and jax.default_backend() == "gpu":
        _warn_of_idle(hosts)
    if nodes is None:
        nodes = _hosts_of_a_stage(_equal_hosts(hosts), pipe)
    num_devices = sum(map(len, hosts.values()))
    if devices_per_node is None:
        devices_per_node = _share(num_devices, pipe, nodes)
    lengths = lengths_beside(nodes, devices_per_node, split)
    needed = pipe * nodes * devices_per_node
    if needed > num_devices:
        raise ValueError(
            f"a mesh of pipe={pipe} x nodes={nodes} x devices_per_node={devices_per_node} needs "
            f"{needed} devices and there are {num_devices}; ask for fewer, or for development "
            f"call zeroxla.simulate({needed}) before JAX starts"
        )
    if needed < num_devices:
        warnings.warn(
            f"a mesh of pipe={pipe} x nodes={nodes} x devices_per_node={devices_per_node} leaves "
            f"{num_devices - needed} of {num_devices} devices idle; pass devices= with those that "
            "it is to have, if that is meant",
            stacklevel=2,
        )
    shape, names = (pipe, nodes, devices_per_node), (PIPE, NODE, DEVICE)
    if devices is None:
        grid = _arranged(hosts, *shape)
    else:
        grid = np.asarray(devices[:needed], dtype=object).reshape(shape)
    if pipe == 1:
        grid, names = grid[0], names[1:]
    split = {name: length for name, length in split.items() if length > 1}
    grid, names = grid.reshape(*grid.shape[:-2], *lengths, *split.values()), (*names, *split)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def _share(num_devices: int, pipe: int, nodes: int) -> int:
    """Return the number of devices of each node of each stage, if all are used.

    Raises:
      ValueError: they do not divide evenly.
    """
    share, idle = divmod(num_devices, pipe * nodes)
    if share and idle:
        parts = f"pipe={pipe} x nodes={nodes}" if pipe > 1 else f"nodes={nodes}"
        fitting = [n for n in range(1, num_devices + 1) if num_devices % (pipe * n) == 0]
        name = "nodes"
        if not fitting:
            name, fitting = "pipe", [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            f"{num_devices} devices do not divide into {parts}: {idle} would be idle; use {name}="
            f"{' or '.join(map(str, fitting))}, or pass devices_per_node={share} to leave them out"
        )
    return max(1, share)


def _arranged(
    hosts: Mapping[str, Sequence[jax.Device]], pipe: int, nodes: int, devices_per_node: int
) -> np.ndarray:
    """Return an array of devices [pipe, node, device]; hosts fill `node` first, then `pipe`."""
    host_nodes = math.gcd(nodes, len(hosts))
    host_stages = len(hosts) // host_nodes
    if pipe % host_stages:  # a node consists of several hosts
        host_nodes = host_stages = 1
        hosts = {"": [device for host in hosts.values() for device in host]}
    parts = (pipe // host_stages, nodes // host_nodes, devices_per_node)
    # Every host gives its first devices: a smaller mesh still spans all hosts.
    first = math.prod(parts)
    if min(map(len, hosts.values())) < first:
        _equal_hosts(hosts)
    grid = np.asarray([host[:first] for host in hosts.values()], dtype=object)
    grid = grid.reshape(host_stages, host_nodes, *parts).swapaxes(1, 2)
    return grid.reshape(pipe, nodes, devices_per_node)


def _hosts_of_a_stage(num_hosts: int, pipe: int) -> int:
    if num_hosts % pipe and pipe % num_hosts:
        raise ValueError(
            f"{num_hosts} hosts do not divide into {pipe} stages, nor pipe={pipe} over the hosts; "
            f"pass nodes={num_hosts} for a part of each stage on every host, or another pipe"
        )
    return max(1, num_hosts // pipe)


def _by_host(devices: Sequence[jax.Device]) -> dict[str, list[jax.Device]]:
    """Return the devices of each host by its name, hosts in the order of their first processes."""
    names = nodes_of_processes() if jax.process_count() > 1 else [""]
    hosts: dict[str, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda d: d.process_index):  # keeps each process' own order
        hosts.setdefault(names[device.process_index], []).append(device)
    return hosts


def _warn_of_idle(hosts: Mapping[str, Sequence[jax.Device]]) -> None:
    """Warn if JAX has fewer GPUs of a host than the processes there see."""
    present = gpus_of_hosts()
    pairs = Counter((len(taken), present[host]) for host, taken in hosts.items())
    short = {pair: times for pair, times in pairs.items() if pair[0] < pair[1]}
    if short:
        idle = sum(times * (there - taken) for (taken, there), times in short.items())
        said = ", ".join(
            f"{times} host{'s' * (times > 1)} x {taken} GPU{'s' * (taken > 1)}, {there} present"
            for (taken, there), times in short.items()
        )
        warnings.warn(
            f"the processes of this run leave {idle} GPUs idle: {said}; call zeroxla.initialize() "
            "in place of jax.distributed.initialize(), start one process a host or as many as "
            "divide its GPUs, or name those that are meant in CUDA_VISIBLE_DEVICES",
            stacklevel=3,
        )


def _equal_hosts(hosts: Mapping[str, Sequence[jax.Device]]) -> int:
    sizes = {name: len(devices) for name, devices in hosts.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"hosts have different numbers of devices ({sizes}); start as many on each, or pass "
            "nodes= and devices="
        )
    return len(hosts)
