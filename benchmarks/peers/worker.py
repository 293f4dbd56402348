"""A rank of a row of PyTorch or DeepSpeed: the worker of fleet.py's protocol.

    python benchmarks/peers/worker.py --engine torch --port 29500

An engine is what has a process to itself: torch, with five rows, or one of DeepSpeed's rows. A
row's model is built at its first order. Gloo, and one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))
import network
from peers import task
from peers.torch_rows import StepFunction

# FSDP2 sets itself up in its first step; DeepSpeed records there in which order leaves are used,
# and fetches ahead from the second on.
WARM_STEPS = 2


class Row:
    """A row in training."""

    def __init__(self, step: StepFunction) -> None:
        self._step, self._num_steps = step, 0
        for _ in range(WARM_STEPS):
            self._take()

    def take(self, steps: int) -> dict[str, Any]:
        """Take steps; return the answer to the order."""
        seconds, losses = [], []
        before = network.sent_bytes()
        dist.barrier()  # no rank sends before all have read
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(self._take())
            seconds.append(time.perf_counter() - begin)
        dist.barrier()  # all have sent
        sent_bytes = network.sent_bytes() - before
        return {"seconds": seconds, "losses": losses, "sent_bytes": sent_bytes}

    def _take(self) -> float:
        data = bytearray(task.tokens(dist.get_rank(), self._num_steps))
        tokens_BL = torch.frombuffer(data, dtype=torch.uint8).view(task.SEQUENCES, -1).long()
        self._num_steps += 1
        return self._step(tokens_BL)


def main() -> None:
    parser = argparse.ArgumentParser(description="A rank of a row of PyTorch or DeepSpeed.")
    parser.add_argument("--engine", required=True, help="torch, or a row of DeepSpeed's")
    parser.add_argument("--port", type=int, required=True, help="that rank 0 listens on")
    parser.add_argument("--every", type=int, default=task.EVERY, help="of the row diloco")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['MASTER_ADDR']}:{options.port}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if options.engine == "torch":
        from peers import torch_rows

        make_step = functools.partial(torch_rows.make_step, every=options.every)
    else:
        from peers.deepspeed_row import make_step

    @functools.cache
    def row(name: str) -> Row:
        return Row(make_step(name))

    _answer({})
    for line in sys.stdin:
        order = json.loads(line)
        _answer(row(order["row"]).take(order["steps"]))
    dist.destroy_process_group()


def _answer(answer: dict[str, Any]) -> None:
    print(f"@{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
