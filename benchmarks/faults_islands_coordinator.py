"""The coordinator of faults_islands.py, as a process that can be killed.

    python benchmarks/faults_islands_coordinator.py TASK

It prints each event, and ends when its standard input does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from faults_islands_task import TOKEN, Task, say

from zeroxla import Coordinator


def main() -> None:
    task = Task.load(sys.argv[1])

    def tell(event: dict[str, Any]) -> None:
        say("event", event=event)

    state = Path(task.folder) / "coordinator.json"
    with Coordinator(
        task.coordinator,
        TOKEN,
        num_islands=task.islands,
        state=state,
        deadline=task.deadline,
        say=tell,
    ):
        say("listens")
        sys.stdin.read()


if __name__ == "__main__":
    main()
