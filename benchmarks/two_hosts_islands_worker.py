"""An island on one of two hosts: the worker of fleet.py's protocol, for rows with islands.

    python benchmarks/two_hosts_islands_worker.py --every 100

Each host has a process of JAX of its own. An answer also has `report` of the row in training.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from typing import Any

from jax.sharding import Mesh
from network import sent_bytes
from peers import task
from two_hosts_islands_rows import start
from two_hosts_worker import global_batch_of

import zeroxla


class Row:
    """A row in training."""

    def __init__(self, name: str, mesh: Mesh, *, host: str, slot: int, every: int) -> None:
        self._mesh, self._slot, self._num_steps = mesh, slot, 0
        self._row = start(name, mesh, self._batch(), host=host, slot=slot, every=every)

    def take(self, steps: int) -> dict[str, Any]:
        """Take steps; return the answer to the order."""
        seconds, losses, before = [], [], sent_bytes()
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(self._take())
            seconds.append(time.perf_counter() - begin)
        sent = sent_bytes() - before
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent, **self._row.report()}

    def _batch(self) -> Any:
        first = self._slot * task.RANKS_PER_HOST
        ranks = range(first, first + task.RANKS_PER_HOST)
        return global_batch_of(ranks, self._num_steps, self._mesh)

    def _take(self) -> float:
        batch = self._batch()
        self._num_steps += 1
        return self._row(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description="An island on one of two hosts.")
    parser.add_argument("--every", type=int, required=True, help="steps between two exchanges")
    options = parser.parse_args()
    # A thread for each device, as a rank of the peers has.
    zeroxla.simulate(task.RANKS_PER_HOST, threads=task.RANKS_PER_HOST)
    mesh = zeroxla.make_mesh(nodes=1)
    slot = int(os.environ["RANK"])
    make = functools.partial(Row, host=os.environ["MASTER_ADDR"], slot=slot, every=options.every)

    @functools.cache
    def row(name: str) -> Row:
        return make(name, mesh)

    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        answer(row(order["row"]).take(order["steps"]))


def answer(value: dict[str, Any]) -> None:
    print(f"@{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
