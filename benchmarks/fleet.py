"""Programs on two hosts that take steps when they are told to, and say how long each took.

A worker is a program started once for each rank. It reads orders from its standard input, one JSON
object a line, and answers each with one JSON object in a line that begins with "@":

    {"row": "zeropp", "steps": 5}
    @{"seconds": [0.71, ...], "losses": [5.61, ...], "sent_bytes": 12300000}

seconds and losses have an element for each step; sent_bytes is what its host sent over the link in
all of them (`network.sent_bytes`), read when every rank is through. Its first line, "@{}", says
that it is ready. A row is a way of training; whatever a row needs to be warm, its first order
includes without being timed. What else a worker prints is kept for the message when it dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from network import Host

LAST_LINES = 30


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time; the text has its last lines."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a fleet says of some steps of a row.

    Attributes:
      seconds: of each step, of the slowest worker.
      losses: of each step, the mean over workers.
      sent_bytes: by one host in one step, the mean over hosts.
    """

    seconds: list[float]
    losses: list[float]
    sent_bytes: float


class Fleet:
    """The workers of one program. Made by `fleet`."""

    def __init__(self, workers: Sequence[_Worker], num_hosts: int) -> None:
        self._workers, self._num_hosts = workers, num_hosts

    def ask(self, row: str, steps: int, *, timeout: float = 600) -> list[dict[str, Any]]:
        """Have every worker take steps; return their answers, by rank.

        Raises:
          WorkerError: one ended, or has not answered within `timeout` seconds.
        """
        for worker in self._workers:
            worker.order({"row": row, "steps": steps})
        return [worker.answer(timeout) for worker in self._workers]

    def take(self, row: str, steps: int, *, timeout: float = 600) -> Steps:
        """Have every worker take steps.

        Raises:
          WorkerError: one ended, or has not answered within `timeout` seconds.
        """
        answers = self.ask(row, steps, timeout=timeout)
        # Workers of a host count the same bytes.
        by_host = [a["sent_bytes"] for a in answers[:: len(answers) // self._num_hosts]]
        return Steps(
            seconds=[max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)],
            losses=[
                sum(all_) / len(all_) for all_ in zip(*(a["losses"] for a in answers), strict=True)
            ],
            sent_bytes=sum(by_host) / len(by_host) / steps,
        )


@contextlib.contextmanager
def fleet(
    hosts: Sequence[Host],
    argv: Sequence[str],
    *,
    ranks_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> Iterator[Fleet]:
    """Start a worker for every rank, wait until all are ready; stop them at the end.

    Args:
      hosts: where; the first one's name is in MASTER_ADDR.
      argv: the program.
      ranks_per_host: how many on each.
      env: variables of every worker, beside RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE,
        which are those of `torchrun`.
      timeout: seconds to become ready.

    Raises:
      WorkerError: one ended, or was not ready in time.
    """
    world = len(hosts) * ranks_per_host
    workers = []
    try:
        for rank in range(world):
            host, local = divmod(rank, ranks_per_host)
            own = {
                "MASTER_ADDR": hosts[0].name,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
            }
            workers.append(_Worker(rank, hosts[host], argv, {**own, **(env or {})}))
        for worker in workers:
            worker.answer(timeout)
        yield Fleet(workers, len(hosts))
    finally:
        for worker in workers:  # all before any: they may end together
            worker.close()
        for worker in workers:
            worker.wait()


class _Worker:
    def __init__(self, rank: int, host: Host, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._rank = rank
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process = host.popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def order(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its answer will say so
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        try:
            found = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise self._error(f"has not answered for {timeout:.0f} s") from None
        if found is None:
            raise self._error(f"ended with {self._process.wait()}")
        return found

    def close(self) -> None:
        """Close its input, at which a worker ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended; kill it if it does not."""
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        else:
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith("@"):
                    self._answers.put(json.loads(line[1:]))
                else:
                    self._last.append(line)
        self._answers.put(None)

    def _error(self, what: str) -> WorkerError:
        return WorkerError(f"worker {self._rank} {what}; its last lines:\n{''.join(self._last)}")
