"""The coordinators of the rows with islands, a process on the first of two hosts.

    python benchmarks/two_hosts_islands_coordinator.py

It prints "@{}" when they listen, as a worker of fleet.py does, and runs until its input ends.
"""

from __future__ import annotations

import contextlib
import sys

from peers import task
from two_hosts_islands_rows import DEADLINE_S, PORTS, TOKEN

import zeroxla


def main() -> None:
    with contextlib.ExitStack() as stack:
        for port in PORTS.values():
            coordinator = zeroxla.Coordinator(
                f"0.0.0.0:{port}",
                TOKEN,
                num_islands=task.HOSTS,
                deadline=DEADLINE_S,
                say=lambda event: print(event, flush=True),
            )
            stack.enter_context(coordinator)
        print("@{}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
