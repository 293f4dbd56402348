"""The workers of all rows at once, so that rows can take turns in one run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet import Fleet, Steps, fleet
from network import Host
from peers import task
from peers.rows import ALL_ROWS, ROWS

WORKER = Path(__file__).with_name("worker.py")
FIRST_PORT = 29500

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Each thread would have a heap of its own. A fixed MALLOC_MMAP_THRESHOLD_ saves a third of the
    # memory besides, but every large array is then new pages: FSDP2's step takes 1.6 times the CPU.
    "MALLOC_ARENA_MAX": "2",
}


class Fleets:
    """The fleets of some rows. Made by `fleets`."""

    def __init__(self, by_engine: Mapping[str, Fleet]) -> None:
        self._by_engine = by_engine

    def take(self, row: str, steps: int, *, timeout: float = 600) -> Steps:
        """Have all ranks of a row take steps; see `Fleet.take`."""
        return self._by_engine[ALL_ROWS[row].engine].take(row, steps, timeout=timeout)

    def ask(self, row: str, steps: int, *, timeout: float = 600) -> list[dict[str, Any]]:
        """Have all ranks of a row take steps; see `Fleet.ask`."""
        return self._by_engine[ALL_ROWS[row].engine].ask(row, steps, timeout=timeout)


@contextlib.contextmanager
def fleets(
    hosts: Sequence[Host], python: str, rows: Iterable[str] = ROWS, *, every: int = task.EVERY
) -> Iterator[Fleets]:
    """Start the workers of rows: RANKS_PER_HOST processes on each host for every engine.

    Args:
      hosts: HOSTS of them.
      python: interpreter of the environment with PyTorch, see requirements.txt.
      rows: names in ALL_ROWS.
      every: steps between two exchanges of the row that does not send in every step.

    Cost: resident memory of a rank: 1.0 GB for all of PyTorch's rows, 0.7 to 0.85 GB for one of
    DeepSpeed's; 0.08 GB of it are shared. All rows take 12 GB after 50 steps of each.

    Raises:
      WorkerError: a worker ended, or was not ready in time.
    """
    engines = dict.fromkeys(ALL_ROWS[row].engine for row in rows)
    with contextlib.ExitStack() as stack:
        by_engine = {}
        for port, engine in enumerate(engines, start=FIRST_PORT):
            argv = [python, str(WORKER), "--engine", engine, "--port", str(port)]
            argv += ["--every", str(every)]
            started = fleet(hosts, argv, ranks_per_host=task.RANKS_PER_HOST, env=ENVIRONMENT)
            by_engine[engine] = stack.enter_context(started)
        yield Fleets(by_engine)
