"""`cluster_parameters` asks JAX what the cluster tells a process; `own_devices` says which of the
host's devices the process takes.

JAX gives a process one device wherever the cluster numbers the processes of a host. That is right
only if there is a process for each device: with one process a host the other devices are idle. So
it is decided here, by the number of processes and of GPUs on the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from jax._src import clusters, xla_bridge

from zeroxla.program.hosts import allocated_gpus, place_on_host, visible_gpus


def cluster_parameters(
    source: str,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout: float,
) -> tuple[str, int, int, Sequence[int] | None]:
    """Fill in the arguments that are None, as `jax.distributed.initialize` would.

    Args:
      source: where the given arguments come from; the error names it.
      coordinator: address of the coordinator, `host:port`.
      num_processes: the number of processes.
      process_id: this process's number.
      timeout: seconds to wait for the cluster's answer.

    Returns:
      (coordinator, number of processes, this process, its devices; None for all of them). The
      devices are those that the cluster's variables tell, before the processes have met.

    Raises:
      ValueError: JAX finds no cluster that tells what is missing, or the host has more processes
        than GPUs.
    """
    if None in (coordinator, num_processes, process_id):
        coordinator, num_processes, process_id, _ = (
            clusters.ClusterEnv.auto_detect_unset_distributed_params(
                coordinator, num_processes, process_id, None, None, round(timeout)
            )
        )
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            f"JAX does not find the coordinator from what {source} says; pass coordinator=, "
            "num_processes= and process_id= to zeroxla.initialize"
        )
    place = place_on_host(source)
    devices = None if place is None else own_devices(source, visible_gpus(), *place)
    return coordinator, num_processes, process_id, devices


def own_devices(
    source: str,
    gpus: Sequence[str],
    rank: int,
    size: int,
    *,
    others: Iterable[Sequence[str]] = (),
    environ: Mapping[str, str] = os.environ,
) -> list[int] | None:
    """Return which of the GPUs that a process sees it takes, by position; None for all of them.

    A process that is alone on its host takes all. Several that see the same GPUs share them out
    evenly, in their order. Those that see different ones, because the cluster has shared them out
    already, take what they see. What a user has told JAX (JAX_LOCAL_DEVICE_IDS,
    JAX_CUDA_VISIBLE_DEVICES) is left as it is. Without NVIDIA GPUs a process takes the device of
    its number, as in JAX; CPU devices do not follow this.

    Args:
      source: who started the processes, for the error.
      gpus: the GPUs that this process sees; see `visible_gpus`.
      rank: the number of this process among those of its host.
      size: the number of processes on the host.
      others: the GPUs that each other process of the host sees, if the processes have met.
      environ: the environment's variables.

    Raises:
      ValueError: the processes see the same GPUs and are more than these.
    """
    chosen = "JAX_LOCAL_DEVICE_IDS" in environ or xla_bridge.CUDA_VISIBLE_DEVICES.value != "all"
    if size == 1 or chosen:
        return None
    if not gpus:
        return [rank]
    others = list(others)
    on_host = allocated_gpus(environ)
    # Where Slurm hides the GPUs of other tasks, each task counts its own from 0. So equal numbers
    # do not show that GPUs are shared, but the number of the step's GPUs on the host does.
    if on_host:
        apart = len(gpus) < on_host
    else:
        apart = len(gpus) == 1 or (bool(others) and all(set(gpus).isdisjoint(x) for x in others))
    if apart:
        return None
    share = len(gpus) // size
    if not share:
        raise ValueError(
            f"{source} has started {size} processes on a host, and they see the same "
            f"{len(gpus)} GPUs ({', '.join(gpus)}); start one process, or one for each GPU, or "
            "give each its own in CUDA_VISIBLE_DEVICES"
        )
    return list(range(rank * share, (rank + 1) * share))
