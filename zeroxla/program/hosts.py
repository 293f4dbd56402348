"""What environment variables say about a process on its host: its GPUs, its neighbours.

Imports no JAX, as launchers use it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path

SLURM, OPEN_MPI = "Slurm", "Open MPI"
# Of a Slurm step first, then of its job. Inside a step the second one is the step's, too.
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names or numbers of the NVIDIA GPUs that this process may use; [] without one."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores what follows a name that is none; -1 and Slurm's NoDevFiles are such.
        names = (name.strip() for name in visible.split(","))
        return list(itertools.takewhile(lambda x: x and x[0] != "-" and x != "NoDevFiles", names))
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((gpu[1] for gpu in found if gpu), key=int)


def allocated_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many of this host's GPUs a Slurm step has, also those that a task does not see; 0
    if no variable says it."""
    return number(environ.get("SLURM_GPUS_ON_NODE")) or 0


def place_on_host(source: str, environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return (number of this process on its host, processes there); None if no variable says it.

    Args:
      source: the cluster whose variables are read, SLURM or OPEN_MPI. Of others none is known.
      environ: the environment's variables.
    """
    if source == SLURM:
        rank, size = environ.get("SLURM_LOCALID", ""), _tasks_here(environ)
    elif source == OPEN_MPI:
        rank = environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "")
        size = number(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    else:
        return None
    if size is None or not rank.isdecimal() or int(rank) >= size:
        return None
    return int(rank), size


def number(text: str | None) -> int | None:
    """Return a whole number; None if a text is none."""
    return int(text) if text is not None and text.isdecimal() else None


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the number of a Slurm step's tasks on this host; None if it is not known."""
    for name in _TASKS_PER_NODE:
        # As in "2(x3),1": two on each of three nodes, one on the fourth.
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", environ.get(name, ""))
        counts = [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]
        if len(set(counts)) == 1:
            return counts[0]
        node = number(environ.get("SLURM_NODEID"))
        if node is not None and node < len(counts):
            return counts[node]
    tasks = number(environ.get("SLURM_NTASKS"))
    nodes = next((n for name in _NUM_NODES if (n := number(environ.get(name)))), None)
    return None if tasks is None or nodes is None or tasks % nodes else tasks // nodes
