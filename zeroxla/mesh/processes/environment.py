"""`find_cluster`: reads from environment variables which process of which run this is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroxla.program.hosts import OPEN_MPI, SLURM

# Variables that `zeroxla launch` sets for the processes that it starts.
COORDINATOR = "ZEROXLA_COORDINATOR"
NUM_PROCESSES = "ZEROXLA_NUM_PROCESSES"
PROCESS_ID = "ZEROXLA_PROCESS_ID"
NODE = "ZEROXLA_NODE"
SIMULATED_DEVICES = "ZEROXLA_SIMULATED_DEVICES"
HEARTBEAT = "ZEROXLA_HEARTBEAT"  # seconds
FAREWELL = "ZEROXLA_FAREWELL"  # seconds
RESTART = "ZEROXLA_RESTART"  # attempts before this one
STARTED = "ZEROXLA_STARTED"  # the name of the run
TOKEN = "ZEROXLA_TOKEN"  # a secret that the processes of a run share
TOKEN_FILE = "ZEROXLA_TOKEN_FILE"  # a file that has it
PROGRESS = "ZEROXLA_PROGRESS"  # "descriptor:inode" of a pipe that takes a byte after each step
# Variables that `zeroxla launch --islands` and `zeroxla island` set.
ISLANDS = "ZEROXLA_ISLANDS"  # "host:port" of the islands' coordinator
ISLANDS_TOKEN = "ZEROXLA_ISLANDS_TOKEN"  # a secret that the islands of a run share
ISLANDS_TOKEN_FILE = "ZEROXLA_ISLANDS_TOKEN_FILE"  # a file that has it
SLOT = "ZEROXLA_SLOT"  # the number of this island


_PMI = "MPICH or Intel MPI"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a run, as far as the environment or the arguments name them.

    Attributes:
      source: name of the program or system that said so, for messages.
      coordinator: "host:port" of process 0. None leaves it to JAX's own detection.
      num_processes: number of processes. None leaves it to JAX's detection, too.
      process_id: number of this process, from 0. None leaves it to JAX's detection, too.
    """

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def find_cluster(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the run that this process was started as a part of; None for a single process.

    Looks for the variables of `zeroxla launch`, of Open MPI (`mpirun`), of a Slurm step (`srun`),
    of MPICH and Intel MPI (`mpiexec`), and of an indexed Kubernetes Job, in this order. (In a Slurm
    allocation `mpirun` starts its own daemons by `srun`, so its processes have Slurm's variables
    too, of the daemons.) In a Slurm allocation but outside of a step, and in a Kubernetes pod
    outside of an indexed Job, the process counts as a single one.

    Raises:
      ValueError: only some of a source's variables are set, or one is not a number.
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    if _complete("zeroxla launch", names, names, environ):
        size, rank = _numbers("zeroxla launch", (NUM_PROCESSES, PROCESS_ID), environ)
        return _several("zeroxla launch", size, rank, environ[COORDINATOR])
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    if _complete(OPEN_MPI, names, names, environ):
        size, rank, _ = _numbers(OPEN_MPI, names, environ)
        return _several(OPEN_MPI, size, rank)
    if _complete(
        SLURM,
        ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
        environ,
    ):
        size, rank = _numbers(SLURM, ("SLURM_NTASKS", "SLURM_PROCID"), environ)
        return _several(SLURM, size, rank)
    names = ("PMI_SIZE", "PMI_RANK")
    if all(name in environ for name in names):  # who also needs to be told the coordinator
        size, rank = _numbers(_PMI, names, environ)
        return _several(_PMI, size, rank)
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        (rank,) = _numbers("Kubernetes", ("JOB_COMPLETION_INDEX",), environ)
        return Cluster(source="Kubernetes", process_id=rank)
    return None


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the processes of this run share; "" if they were given none.

    `zeroxla launch` sets ZEROXLA_TOKEN. Under other systems set it, or ZEROXLA_TOKEN_FILE to a file
    that only the run's user can read.

    Raises:
      ValueError: the file cannot be read or is empty.
    """
    return _secret(TOKEN, TOKEN_FILE, environ)


def find_islands_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret that the islands of a run share; "" if there is none.

    Raises:
      ValueError: the file of ZEROXLA_ISLANDS_TOKEN_FILE cannot be read or is empty.
    """
    return _secret(ISLANDS_TOKEN, ISLANDS_TOKEN_FILE, environ)


def island_of(
    address: str | None,
    token: str | None,
    slot: int | None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, str, int | None]:
    """Return coordinator, token and slot of an island; what is None is read from the environment.

    Raises:
      ValueError: there is no address, or a variable cannot be used.
    """
    address = environ.get(ISLANDS, "") if address is None else address
    if not address:
        raise ValueError(
            f"the island has no coordinator; pass its address, set {ISLANDS}, or start the program "
            "with `zeroxla launch --islands 2 -- ...` or `zeroxla island --join HOST:PORT -- ...`"
        )
    if slot is None and SLOT in environ:
        (slot,) = _numbers("zeroxla island", (SLOT,), environ)
    return address, find_islands_token(environ) if token is None else token, slot


def _secret(name: str, file: str, environ: Mapping[str, str]) -> str:
    """Return a secret from a variable, or from the file that another one names."""
    if name in environ or file not in environ:
        return environ.get(name, "")
    path = Path(environ[file])
    try:
        token = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}={path} cannot be read ({error}); correct it") from error
    if not token:
        raise ValueError(f"{file}={path} is empty; write a random text into it")
    return token


def _complete(
    source: str, signs: Sequence[str], needed: Sequence[str], environ: Mapping[str, str]
) -> bool:
    """Return whether the variables `needed` are set. If one of `signs` is set but not all `needed`
    are, raise ValueError; if none of `signs` is, return False."""
    if not any(name in environ for name in signs):
        return False
    missing = [name for name in needed if name not in environ]
    if missing:
        found = [name for name in needed if name in environ]
        raise ValueError(
            f"the environment has {', '.join(found)} of {source} and lacks {', '.join(missing)}; "
            f"start the process with {source} again, unset the variables to run one process, or "
            "pass coordinator=, num_processes= and process_id= to zeroxla.initialize"
        )
    return True


def _numbers(source: str, names: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    for name in names:
        if not environ[name].isdecimal():
            raise ValueError(
                f"{name}={environ[name]!r} of {source} is not a whole number; correct or unset it"
            )
    return [int(environ[name]) for name in names]


def _several(source: str, size: int, rank: int, coordinator: str | None = None) -> Cluster | None:
    if rank >= size:
        raise ValueError(
            f"{source} says that this is process {rank} of {size}, and they count from 0; correct "
            "its variables"
        )
    if size == 1:
        return None
    return Cluster(source=source, coordinator=coordinator, num_processes=size, process_id=rank)
