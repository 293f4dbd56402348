"""Turn Ctrl-C and SIGTERM into a request to stop at a good moment."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


class StopRequest:
    """Says whether the process was asked to stop.

    Attributes:
      requested: True after the first SIGINT or SIGTERM.
    """

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def stop_on_signal(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """While inside, let the first SIGINT or SIGTERM only set a flag; a second one acts as usual.

    Args:
      on_request: Called once, from the signal handler: tell the user that it was heard.

    Yields:
      The flag.

    Raises:
      ValueError: From Python, when called in another thread than the main one.
    """
    stop = StopRequest()
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number in signals:
            signal.signal(number, previous[number])

    def handle(number: int, frame: object) -> None:
        stop.requested = True
        restore()
        on_request()

    try:
        for number in signals:
            signal.signal(number, handle)
        yield stop
    finally:
        restore()
