"""Turns Ctrl-C and SIGTERM into a request to stop after the present step."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Whether this process, or any process of the run, has been asked to stop.

    Attributes:
      requested: True after this process has received its first SIGINT or SIGTERM.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self._on_request = on_request

    def requested_by(self, step: int) -> bool:
        """Return whether to stop after `step` steps. The answer is the same in all processes.

        All of them must ask, for every step and in order.
        """
        if jax.process_count() == 1:
            return self.requested
        # JAX's own watch on SIGTERM: the processes agree on a step that none has passed yet.
        if not self.requested and multihost_utils.reached_preemption_sync_point(step):
            self.request()
        return self.requested

    def request(self) -> None:
        """Request the stop."""
        self.requested = True
        self._on_request()


@contextlib.contextmanager
def stop_on_signal(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """Let the first SIGINT or SIGTERM inside only set a flag; a second one acts as usual.

    If a run has several processes, a signal to any of them sets the flag of all.

    Args:
      on_request: called once, to tell the user that the request was heard.

    Yields:
      The flag.

    Raises:
      ValueError: from Python, if called in another thread than the main one.
    """
    stop = StopRequest(on_request)
    several = jax.process_count() > 1
    # If there are several processes, JAX handles SIGTERM already.
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
