"""`Ending`: the processes of a run end together, or all at once when one of them fails.

JAX's own end is a barrier: a process that fails would wait there for 300 s, and the others wait for
it in their collectives. So a process that ends with an exception tells the others through the
coordinator's key-value store, and leaves without the barrier. Each process has a thread that
listens, and that ends it when another has failed. Process 0 is the last to leave, because the store
lives in it, and JAX aborts the processes that have lost it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

from zeroxla.mesh.processes import progress
from zeroxla.program.compat import coordination_client

_FAILURE = "zeroxla/failure"
_LEFT = "zeroxla/left"
_TOGETHER = "zeroxla/all have ended"
_FOREVER_MS = 2_000_000_000  # 23 days; the client takes no more than 31 bits
# Seconds in which a process may find the failure by itself, and say more about it.
_NOTICE = 2.0
# Seconds after a failure in which a process leaves, whatever its other threads do.
_AT_MOST = 3.0
# Seconds after a failure in which work that was begun together, such as a checkpoint, may end.
_WORK = 60.0
# Seconds between the word of a process that it leaves, and its end.
_LAST = 0.5

_last_work: list[Callable[[float], None]] = []


def before_leaving(work: Callable[[float], None]) -> None:
    """Have a function called before this process leaves because one of the run has failed.

    Args:
      work: is given the most seconds that it may take. All processes of the run call theirs.
    """
    _last_work.append(work)


class Ending:
    """Lets this process end together with the others of its run.

    From `begin` on, functions registered with `atexit` before it run only if all processes end
    together.

    Args:
      process_id: the number of this process.
      num_processes: the number of processes.
      patience: seconds that a process which has ended waits for the others to end. Then it counts
        as one that left too early, and the run ends.
    """

    def __init__(self, process_id: int, num_processes: int, patience: float) -> None:
        self._me, self._size, self._patience = process_id, num_processes, patience
        self._client: Any = coordination_client()
        self._pid = os.getpid()
        self._status: int | None = None  # once this process has failed
        self._asked: Any = None  # the argument of the last sys.exit
        self._listener = threading.Thread(target=self._listen, name="zeroxla end", daemon=True)

    def begin(self) -> None:
        """Watch this process and the others from now on."""
        self._show, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_exit
        atexit.register(self._at_end)  # the last registered runs first, JAX's own after it
        self._listener.start()

    # ------------------------------------------------------------------ this process fails

    def _on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._show(kind, error, trace)
        if not self._is_over():
            status = 130 if issubclass(kind, KeyboardInterrupt) else 1
            # Threads of the program may wait for other processes, and Python waits for threads.
            late = threading.Timer(_AT_MOST, self._leave, [status])
            late.daemon = True
            late.start()
            self._fail(f"{kind.__name__}: {error}", status)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        self._asked = status
        self._exit(status)

    def _at_end(self) -> None:
        if self._is_over():
            return
        if self._status is None:
            try:
                self._client.wait_at_barrier(_TOGETHER, round(self._patience * 1000))
            # The client raises its own error, whose class jaxlib does not export.
            except Exception as error:
                # sys.exit takes a text for 1, and here nobody may leave with 0.
                status = self._asked if isinstance(self._asked, int) and self._asked else 1
                self._fail(self._too_early(error), status)
            else:
                if self._me == 0:  # lets the listeners end, which would disturb Python's end
                    self._client.key_value_set(_FAILURE, json.dumps(None))
                self._listener.join(timeout=_AT_MOST)
                return
        assert self._status is not None
        self._leave(self._status)

    def _too_early(self, error: Exception) -> str:
        """Return the description of an end at which the others did not come."""
        ended = "its program ended" if self._asked is None else f"sys.exit({self._asked!r})"
        if "DEADLINE_EXCEEDED" not in str(error):
            return f"{ended}, and the others cannot be reached: {str(error).splitlines()[0]}"
        return (
            f"{ended}, and others went on for more than {self._patience:g} s; let all processes "
            "end together, or allow more seconds (launch --farewell, farewell_timeout=)"
        )

    def _fail(self, why: str, status: int) -> None:
        """Tell the others, unless one of them has failed before."""
        self._status = status
        try:
            self._client.key_value_set(_FAILURE, json.dumps([self._me, why]))
        except Exception:  # another has, or the store is gone
            progress.fails(first=False)
            with contextlib.suppress(Exception):
                self._say_who(json.loads(self._client.blocking_key_value_get(_FAILURE, 1000)))
        else:
            progress.fails(first=True)
            self._say_who([self._me, why])

    def _say_who(self, failed: Sequence[Any]) -> None:
        other, why = failed
        this = "" if other == self._me else f"process {self._me} ends because "
        print(f"zeroxla: {this}process {other} failed: {why}", file=sys.stderr, flush=True)

    def _leave(self, status: int) -> NoReturn:
        """End this process without JAX's barrier; process 0 waits for the others to leave first."""
        for work in _last_work:
            with contextlib.suppress(Exception):  # a failure has been told
                work(_WORK)
        if self._me != 0:
            with contextlib.suppress(Exception):
                self._client.key_value_set(f"{_LEFT}/{self._me}", "")
            leave(status)
        until = time.monotonic() + _AT_MOST
        for other in range(1, self._size):
            left_ms = round(1000 * (until - time.monotonic()))
            with contextlib.suppress(Exception):  # it is gone without a word
                self._client.blocking_key_value_get(f"{_LEFT}/{other}", max(1, left_ms))
        time.sleep(_LAST)
        leave(status)

    # ------------------------------------------------------------------ another fails

    def _listen(self) -> None:
        try:
            said = json.loads(self._client.blocking_key_value_get(_FAILURE, _FOREVER_MS))
        except Exception:  # jax.distributed.shutdown()
            return
        if said is None or said[0] == self._me:
            return
        until = time.monotonic() + _NOTICE
        while self._status is None and time.monotonic() < until:
            time.sleep(0.05)
        if self._status is None:
            self._status = 1
            progress.fails(first=False)
            self._say_who(said)
            self._leave(1)

    def _is_over(self) -> bool:
        """Return whether this is a fork of the process, or JAX has been shut down."""
        return os.getpid() != self._pid or coordination_client() is not self._client


def leave(status: int) -> NoReturn:
    """End this process at once, with what it has printed."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
