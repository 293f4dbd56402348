"""`StopSignals`: the signals that ask a launch to end."""

from __future__ import annotations

import queue
import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """Collects SIGINT and SIGTERM while it is entered, and wakes those who wait.

    Enter it in the main thread; any thread may read it.

    Attributes:
      numbers: the signals that have come, in their order.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._waiting: list[queue.SimpleQueue[Any]] = []
        self._before: dict[int, Any] = {}

    def wake(self, waiting: queue.SimpleQueue[Any]) -> None:
        """Put None into a queue at each signal from now on."""
        self._waiting.append(waiting)

    def __enter__(self) -> StopSignals:
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        for waiting in self._waiting:
            waiting.put(None)
