"""Turn Ctrl-C and SIGTERM into a request to stop at a good moment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Says whether the process was asked to stop; of several processes, whether any was.

    Attributes:
      requested: True after the first SIGINT or SIGTERM of this process.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._on_request = on_request

    def requested_by(self, step: int) -> bool:
        """Return whether to stop after `step` steps: the same in all processes.

        All must ask for every step, in order.
        """
        if jax.process_count() == 1:
            return self.requested
        # JAX's own watch on SIGTERM: the processes agree on a step that none has passed yet.
        if not self.requested and multihost_utils.reached_preemption_sync_point(step):
            self.request()
        return self.requested

    def request(self) -> None:
        """Ask for the stop."""
        self.requested = True
        self._on_request()


@contextlib.contextmanager
def stop_on_signal(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """While inside, let the first SIGINT or SIGTERM only set a flag; a second one acts as usual.

    Of several processes each signal to any of them counts.

    Args:
      on_request: Called once: tell the user that it was heard.

    Yields:
      The flag.

    Raises:
      ValueError: From Python, when called in another thread than the main one.
    """
    stop = StopRequest(on_request)
    several = jax.process_count() > 1
    # Of several processes JAX has taken SIGTERM already.
    signals = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number in signals:
            signal.signal(number, previous[number])

    def handle(number: int, frame: object) -> None:
        restore()
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            stop.request()

    try:
        for number in signals:
            signal.signal(number, handle)
        yield stop
    finally:
        restore()
