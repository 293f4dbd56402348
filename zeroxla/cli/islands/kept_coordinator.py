"""`KeptCoordinator`: a coordinator that can come to expect fewer islands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroxla.step.islands.membership.coordinator import Coordinator


class KeptCoordinator:
    """Runs a coordinator on a free port of this machine, for the islands of one launch.

    A coordinator waits for a fixed number of islands before it begins, and for a deadline when all
    have left. If some have ended for good, it is replaced by one that expects fewer, at the same
    address and with the same file; islands meet the new one by themselves.

    Args:
      token: the secret of the islands.
      num_islands: the number of islands.
      state: the coordinator's file.
      deadline: seconds that a round waits for an island.
      say: is called with what happens.

    Attributes:
      address: where it listens.

    Raises:
      ValueError: the file cannot be used.
    """

    def __init__(
        self,
        token: str,
        *,
        num_islands: int,
        state: Path,
        deadline: float,
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self._token, self._state, self._deadline, self._say = token, state, deadline, say
        self._num_islands, self._has_begun = num_islands, False
        self._lock = threading.Lock()
        self._coordinator = self._start("127.0.0.1:0")
        self.address = self._coordinator.address

    def __enter__(self) -> KeptCoordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._coordinator.close()

    def expect(self, num_islands: int) -> None:
        """Let a run begin when so many islands are there; one that has begun before, with one."""
        with self._lock:
            num_islands = 1 if self._has_begun else num_islands
            if num_islands >= self._num_islands:
                return
            self._num_islands = num_islands
            self._coordinator.close()
            self._coordinator = self._start(self.address)

    def _start(self, address: str) -> Coordinator:
        # Here, because --help need not wait for it.
        from zeroxla.step.islands.membership.coordinator import Coordinator

        return Coordinator(
            address,
            self._token,
            num_islands=self._num_islands,
            state=self._state,
            deadline=self._deadline,
            say=self._note,
        )

    def _note(self, event: dict[str, Any]) -> None:
        self._has_begun |= event["what"] == "started"
        self._say(event)
