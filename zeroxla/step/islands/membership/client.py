"""`Membership`: joins a process of an island to the coordinator, for as long as it trains."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from zeroxla.mesh.processes.address import split_address
from zeroxla.step.islands.membership.coordinator import MEMBER
from zeroxla.step.islands.membership.door import call, check_token, hang_up
from zeroxla.step.islands.membership.frames import FrameError, FrameReader
from zeroxla.step.islands.membership.line import Line, beat_of, next_message
from zeroxla.step.islands.membership.messages import MAX_BYTES, MemberReport, View
from zeroxla.step.islands.membership.post import Post

_RETRY_S = 0.2
_FIRST_S = 10.0
"""Seconds without a word before the coordinator has said its deadline."""


class Membership:
    """Keeps the newest `View` of the coordinator, and tells it what changes here.

    A connection that is lost is made again, for ever: without the coordinator the island trains on.

    Args:
      address: the coordinator's, "host:port".
      token: the secret of the run.
      slot: the number of the island; None takes a free one.
      process: the number of this process in the island.
      num_processes: the number of the island's processes.
      host: the address at which other islands reach this process. None takes the one that the
        coordinator sees.
      timeout: seconds to wait for the coordinator.
      max_bytes: the most bytes of a frame from another island.

    Attributes:
      post: sends to other islands.
      view: what the coordinator has said last.

    Raises:
      ValueError: the coordinator refuses, or an argument is malformed.
      TimeoutError: it was not to be reached, or has another token.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        slot: int | None = None,
        process: int = 0,
        num_processes: int = 1,
        host: str | None = None,
        timeout: float = 300.0,
        max_bytes: int = 2**33,
    ) -> None:
        check_token(token)
        self._place, self._token, self._timeout = split_address(address), token, timeout
        self.member = secrets.randbelow(2**32 - 1) + 1
        self.post = Post(self.member, token, max_bytes=max_bytes)
        self._report = MemberReport(
            slot=slot, process=process, num_processes=num_processes, port=self.post.port, host=host
        )
        self._view: View | None = None
        self._why = "nothing was heard of it"
        self._seen_at = self._lost_at = 0.0
        self._line: Line | None = None
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="zeroxla-membership")
        self._thread.start()
        self._join(address)
        self.tell(slot=self.view.slot)

    def _join(self, address: str) -> None:
        """Wait for the coordinator's first word. A slot may be taken for a while by an island that
        was lost."""
        deadline, is_short = time.monotonic() + self._timeout, False
        while self._view is None or self._view.refused:
            if time.monotonic() > deadline:
                why = "" if self._view is None else self._view.refused
                self.close()
                if why:
                    raise ValueError(f"the coordinator at {address} refuses this island: {why}")
                raise TimeoutError(
                    f"the coordinator at {address} did not answer within {self._timeout:.0f} s, or "
                    f"has another token or version ({self._why})"
                )
            self.wait_for(lambda: self._view is not None and not self._view.refused, 1.0)
            if self._view is not None and self._view.refused:
                if not is_short:
                    deadline = min(deadline, time.monotonic() + 2 * self._view.deadline)
                is_short = True
                self.tell()

    @property
    def view(self) -> View:
        """What the coordinator has said last."""
        assert self._view is not None
        return self._view

    @property
    def report(self) -> MemberReport:
        """What this process says."""
        return self._report

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator is there, and takes this island."""
        return self._line is not None and not (self._view is not None and self._view.refused)

    @property
    def alone_s(self) -> float:
        """Seconds since which the coordinator is not there; 0 while it is."""
        with self._change:
            return 0.0 if self.is_connected else time.monotonic() - self._lost_at

    @property
    def is_closed(self) -> bool:
        """Whether this process has left the run."""
        return self._closed

    @property
    def closes_in(self) -> float | None:
        """Seconds until the open round goes on without who is not ready; None if it is not open, or
        the coordinator is not there."""
        with self._change:
            if not self.is_connected or self._view is None or self._view.closes_in is None:
                return None
            return self._view.closes_in - (time.monotonic() - self._seen_at)

    def tell(self, **changed: Any) -> None:
        """Change what this process says, and say it."""
        with self._change:
            self._report = dataclasses.replace(self._report, **changed)
            if self._line is not None:
                self._line.tell(self._report.to_bytes())

    def prepare(self, **changed: Any) -> None:
        """Change what this process says next."""
        with self._change:
            self._report = dataclasses.replace(self._report, **changed)

    def note(self, kind: str, key: int, value: Any) -> None:
        """Change one entry of `ready`, `held`, `failed` or `checksums`, and say it."""
        with self._change:
            self.tell(**{kind: {**getattr(self._report, kind), key: value}})

    def drop(self, key: int) -> None:
        """Say nothing any more of a round."""
        with self._change:
            kinds = ("ready", "held", "failed")
            mine = {kind: dict(getattr(self._report, kind)) for kind in kinds}
            for entries in mine.values():
                entries.pop(key, None)
            self.tell(**mine)

    def begin(self, **said: Any) -> None:
        """Say what all islands must have in common, and wait until the run has begun.

        Raises:
          ValueError: the coordinator refuses; the message says why.
          TimeoutError: other islands did not come.
        """
        self.tell(**said)

        def is_known() -> bool:
            return bool(self.view.refused) or (self.view.knows and self.view.started)

        if not self.wait_for(is_known, self._timeout):
            raise TimeoutError(
                f"the other islands did not come within {self._timeout:.0f} s; start them, or tell "
                "the coordinator to wait for fewer"
            )
        if self.view.refused:
            raise ValueError(self.view.refused)

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._change:
            self._change.notify_all()

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        """Wait until something holds of the view, or the time is over; return whether it does."""
        with self._change:
            return self._change.wait_for(predicate, timeout)

    def close(self) -> None:
        """Leave the run."""
        with self._change:
            self._closed = True
            line = self._line
            self._change.notify_all()
        if line is not None:
            line.close()
        self.post.close()

    def _run(self) -> None:
        """Keep the connection, and take views; runs in a thread."""
        while not self._closed:
            try:
                self._talk()
            except (OSError, FrameError) as error:
                self._why = str(error)
            with self._change:
                if self.is_connected:
                    self._lost_at = time.monotonic()
                self._line = None
                self._change.notify_all()
                if not self._closed:
                    self._change.wait(_RETRY_S)

    def _talk(self) -> None:
        """Talk to the coordinator until the connection ends."""
        connection, other, key = call(*self._place, self._token, self.member, timeout=_FIRST_S)
        if other != MEMBER:
            hang_up(connection)
            raise FrameError("an island listens there, not the coordinator")
        deadline = _FIRST_S if self._view is None else self._view.deadline
        line = Line(connection, key, self.member, beat_of(deadline))
        try:
            with self._change:
                self._line = line
                line.tell(self._report.to_bytes())
            reader = FrameReader(connection, key, MEMBER, MAX_BYTES)
            while not self._closed:
                # A connection that was silent for a while is made again: TCP itself would wait for
                # up to as long as the link was cut.
                connection.settimeout(deadline / 2)
                view = View.of(next_message(reader))
                deadline = view.deadline
                line.set_beat(beat_of(deadline))
                with self._change:
                    if view.refused and self.is_connected:
                        self._lost_at = time.monotonic()
                    self._view, self._seen_at = view, time.monotonic()
                    self._change.notify_all()
        finally:
            line.close()
