"""`Exchange`: takes part in one round, in a thread beside training."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np

from zeroxla.step.islands.local_rows import as_rows, local_rows
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.membership.messages import View
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.islands.outer_state import FragmentState

_POLL_S = 1.0
_MOVES = ("parts", "means")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """The result of an exchange.

    Attributes:
      mean: the mean of the differences, float32 [devices, size].
      error: what this island's difference has lost by quantizing.
      mean_error: what its part of the mean has lost.
      num_bytes: what this process has sent to others.
      seconds: how long the exchange took, from the time that all were ready.
      num_islands: who took part.
    """

    mean: jax.Array
    error: jax.Array | None
    mean_error: jax.Array | None
    num_bytes: int
    seconds: float
    num_islands: int


class _FailedError(Exception):
    """An attempt that could not be finished.

    Attributes:
      move: the move in which it failed, 0 or 1.
      slots: the islands that are to blame.
    """

    def __init__(self, move: int, slots: set[int]) -> None:
        super().__init__()
        self.move, self.slots = move, slots


class _OverError(Exception):
    """An attempt that the coordinator has ended."""


class Exchange:
    """Takes part in one round; it runs in a thread of its own from the start.

    Args:
      number: the number of the round.
      programs: the programs of its fragment.
      membership: joins this process to the others.
      difference: what the island has changed, float32 [devices, size].
      state: the state of the fragment.
      num_rows: rows that it has trained on since it took part last.
      due: the clock at which the result is merged.

    Attributes:
      number, due, num_rows, difference: as given.
      mean: the result; None if the round was closed without this island, or is not closed.
      counted: whether the round was closed with this island, whose result others have gone on from
        since.
      error: what ended it besides; None if nothing did.
      began: when it began, in seconds.
    """

    def __init__(
        self,
        number: int,
        programs: OuterPrograms,
        membership: Membership,
        difference: jax.Array,
        state: FragmentState,
        *,
        num_rows: int,
        due: int,
    ) -> None:
        self.number, self.due, self.num_rows = number, due, num_rows
        self.mean: Mean | None = None
        self.counted = False
        self.error: BaseException | None = None
        self.began = time.monotonic()
        self._programs, self._membership = programs, membership
        self.difference, self._state = difference, state
        self._ended = threading.Event()
        name = f"zeroxla-round-{number}"
        threading.Thread(target=self._run, daemon=True, name=name).start()

    @property
    def has_ended(self) -> bool:
        """Whether the round was closed."""
        return self._ended.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait until the round was closed, or the time is over; return whether it was."""
        return self._ended.wait(timeout)

    def _run(self) -> None:
        number, membership = self.number, self._membership
        membership.note("ready", number, self.num_rows)
        try:
            self.mean = self._take_part()
        except BaseException as error:  # The island's main thread raises it.
            self.error = error
        membership.drop(number)
        self._ended.set()
        membership.wake()

    def _take_part(self) -> Mean | None:
        """Exchange until an attempt counts, or the round was closed without this island."""
        number, membership, held, last = self.number, self._membership, None, ""
        while True:
            view = self._next_turn(last)
            if view is None or view.round > number:
                if view is None or not view.versions:
                    return None
                fragment = number % len(view.versions)
                closed = view.closed.get(fragment)
                if closed is not None and closed.round == number:
                    return held if closed.attempt == last else None
                self.counted = view.counted[fragment] == number + 1
                return None
            held, last = None, view.attempt
            try:
                held, digest = self._attempt(view)
            except _FailedError as error:
                for place in view.roster:
                    if place.slot in error.slots:
                        membership.post.hang_up(place.addresses[membership.report.process].member)
                membership.note("failed", number, (last, error.move, sorted(error.slots)))
            except _OverError:
                pass
            else:
                membership.note("held", number, (last, digest))

    def _next_turn(self, last: str) -> View | None:
        """Return the view in which this island's next attempt begins, or the round is over; None
        if the island leaves the run."""
        membership, slot = self._membership, self._membership.report.slot

        def is_turn() -> bool:
            view = membership.view
            mine = any(place.slot == slot for place in view.roster)
            ours = view.round == self.number and view.attempt not in ("", last) and mine
            return membership.is_closed or view.round > self.number or ours

        while not membership.wait_for(is_turn, _POLL_S):
            pass
        return None if membership.is_closed else membership.view

    def _attempt(self, view: View) -> tuple[Mean, str]:
        """Exchange with the islands of a roster; return the result and its digest."""
        roster, began = view.roster, time.perf_counter()
        slot, process = self._membership.report.slot, self._membership.report.process
        index = next(i for i, place in enumerate(roster) if place.slot == slot)
        programs = self._programs.among(len(roster))
        data, error = programs.encode(self.difference, self._state.error)
        mine = local_rows(data)
        sent = self._membership.post.num_sent
        parts = [np.ascontiguousarray(mine[:, to]).tobytes() for to in range(len(roster))]
        arrived = self._swap(view, process, 0, parts)
        rows = (len(mine), -1)
        received = [np.frombuffer(part, np.uint8).reshape(rows) for part in arrived]
        weights = np.asarray([place.rows for place in roster], np.float32)
        mean, mean_error = programs.average(
            as_rows(np.stack(received, axis=1), data), self._state.mean_error, index, weights
        )
        own = local_rows(mean).tobytes()
        means = self._swap(view, process, 1, [own] * len(roster))
        digest = hashlib.sha256()
        for part in means:
            digest.update(part)
        received = [np.frombuffer(part, np.uint8).reshape(rows) for part in means]
        found = Mean(
            mean=programs.decode(as_rows(np.stack(received, axis=1), data)),
            error=error,
            mean_error=mean_error,
            num_bytes=self._membership.post.num_sent - sent,
            seconds=time.perf_counter() - began,
            num_islands=len(roster),
        )
        return found, digest.hexdigest()

    def _swap(self, view: View, process: int, move: int, parts: Sequence[bytes]) -> list[bytes]:
        """Send a part to each island of the roster, and return what each has sent."""
        membership, post = self._membership, self._membership.post
        name, roster = f"{view.attempt}/{_MOVES[move]}", view.roster
        others = [i for i, place in enumerate(roster) if place.slot != membership.report.slot]
        if not others:
            return list(parts)

        def send(to: int) -> None:
            address = roster[to].addresses[process]
            post.send(address, name, parts[to], timeout=view.deadline)

        def is_over() -> bool:
            return membership.is_closed or (
                membership.is_connected and membership.view.attempt != view.attempt
            )

        found = list(parts)
        with concurrent.futures.ThreadPoolExecutor(len(others), "zeroxla-send") as pool:
            sends = {to: pool.submit(send, to) for to in others}

            def unsent() -> set[int]:
                return {roster[to].slot for to, x in sends.items() if x.done() and x.exception()}

            for i in others:
                source = roster[i].addresses[process].member
                try:
                    part = post.take(
                        source,
                        name,
                        timeout=view.deadline,
                        is_over=lambda: is_over() or bool(unsent()),
                    )
                    if part is not None and len(part) != len(parts[0]):
                        raise ValueError("another length")
                except (OSError, ValueError):
                    raise _FailedError(move, {roster[i].slot} | unsent()) from None
                if part is None:
                    if failed := unsent():
                        raise _FailedError(move, failed)
                    raise _OverError
                found[i] = part
        if failed := unsent():
            raise _FailedError(move, failed)
        return found
