"""A process of zeroxla on one of two hosts: the worker of fleet.py's protocol, for all our rows.

python benchmarks/two_hosts_worker.py --port 29400
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from network import sent_bytes
from peers import task
from two_hosts_rows import make_step

import zeroxla

WARM_STEPS = 2


def global_batch_of(ranks: range, step: int, mesh: Mesh) -> Any:
    """Return the batch of some ranks in a step, on a mesh."""
    rows = [np.frombuffer(task.tokens(rank, step), np.uint8) for rank in ranks]
    tokens = np.concatenate(rows).reshape(-1, task.LENGTH + 1).astype(np.int32)
    return zeroxla.global_batch({"tokens": tokens}, mesh)


class Row:
    """A row in training."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self._mesh, self._num_steps = mesh, 0
        self._step = make_step(name, mesh, self._batch())
        for _ in range(WARM_STEPS):
            self._take()

    def take(self, steps: int) -> dict[str, Any]:
        """Take steps; return the answer to the order."""
        seconds, losses = [], []
        before = sent_bytes()
        multihost_utils.sync_global_devices("before")  # no process sends before all have read
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(self._take())
            seconds.append(time.perf_counter() - begin)
        multihost_utils.sync_global_devices("after")  # all have sent
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent_bytes() - before}

    def _batch(self) -> Any:
        index, count = zeroxla.process_shard(self._mesh)
        ranks = range(index * task.WORLD // count, (index + 1) * task.WORLD // count)
        return global_batch_of(ranks, self._num_steps, self._mesh)

    def _take(self) -> float:
        batch = self._batch()
        self._num_steps += 1
        return self._step(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description="A process of zeroxla on one of two hosts.")
    parser.add_argument("--port", type=int, required=True, help="that process 0 listens on")
    options = parser.parse_args()
    # A thread for each device, as a rank of the peers has.
    zeroxla.simulate(task.RANKS_PER_HOST, threads=task.RANKS_PER_HOST)
    zeroxla.initialize(
        f"{os.environ['MASTER_ADDR']}:{options.port}",
        num_processes=int(os.environ["WORLD_SIZE"]),
        process_id=int(os.environ["RANK"]),
        heartbeat_timeout=100,
    )
    mesh = zeroxla.make_mesh()

    @functools.cache
    def row(name: str) -> Row:
        return Row(name, mesh)

    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        answer(row(order["row"]).take(order["steps"]))


def answer(value: dict[str, Any]) -> None:
    print(f"@{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
