"""`Meetings`: what an island does between two steps.

It starts rounds, merges their results, catches up, and answers islands that catch up.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from zeroxla.config.outer import Outer
from zeroxla.step.islands.catch_up import CatchUp
from zeroxla.step.islands.crew import Crew
from zeroxla.step.islands.exchange import Exchange, Mean
from zeroxla.step.islands.handover import INNER, Answers
from zeroxla.step.islands.local_rows import checksum
from zeroxla.step.islands.membership.client import Membership
from zeroxla.step.islands.outer_programs import OuterPrograms
from zeroxla.step.islands.outer_state import IslandState

_POLL_S = 0.05
_PATIENCE = 4
"""Deadlines after which an exchange is not waited for: islands gather for one at most, and exchange
for two."""
_CHECKS = 10
"""How often, between two rounds, the processes of an island look what has happened."""


class Meetings:
    """Deals with all that happens at one place between steps, in all processes of the island alike.

    Each process names what it has seen. What all of them name is dealt with.

    Args:
      membership: joins this process to the others.
      crew: the processes of the island.
      outer: how islands exchange; its `fragments` is a number.
      programs: the programs of each fragment.

    Attributes:
      catch_up: fetches what the island has missed.
      num_rows: rows that the island has trained on; whoever takes steps counts them.
      step_s: seconds of the last step.
      is_late: whether others wait for this island: it takes part in the next round as soon as that
        is open.
    """

    def __init__(
        self,
        membership: Membership,
        crew: Crew,
        outer: Outer,
        programs: Sequence[OuterPrograms],
    ) -> None:
        self.catch_up = CatchUp(membership, crew, outer, programs)
        self.num_rows, self.step_s, self.is_late = 0, 0.0, False
        self._membership, self._crew = membership, crew
        self._outer, self._programs = outer, programs
        self._answers = Answers(membership)
        self._pending: dict[int, Exchange] = {}
        self._rows_at: dict[int, int] = {}  # by fragment, when it was exchanged last

    def meet(self, state: IslandState, *, settle: bool) -> tuple[IslandState, dict[str, Any]]:
        """Deal with what has happened, and wait for the exchanges that are due, within limits.

        Args:
          state: the state.
          settle: wait for all exchanges.

        Returns:
          The state, and what the merges have to tell.
        """
        told: dict[str, Any] = {}
        if not settle and not self._is_time(state):
            return state, told
        while True:
            names = self._crew.common(self._names(state, settle))
            for name in names:
                state, found = self._deal(state, name)
                for key in ("outer_bytes", "outer_s"):  # Two may be merged at once.
                    if key in told and key in found:
                        found[key] += told[key]
                told |= found
            late = [x for x in self._pending.values() if settle or state.clock >= x.due]
            if not names and (not late or self._crew.common(self._alone(late))):
                self._tell(state)
                return state, told
            if not names:
                late[0].wait(_POLL_S)

    def _tell(self, state: IslandState) -> None:
        """Tell the coordinator how far the island is, if that has changed."""
        number, report = min(self._pending, default=state.round), self._membership.report
        if (state.versions, number) != (report.versions, report.round):
            self._membership.tell(versions=state.versions, round=number)

    def settle(self, state: IslandState) -> IslandState:
        """Wait for all exchanges, merge them, and catch up with the other islands."""
        state, _ = self.meet(state, settle=True)
        until = time.monotonic() + self._membership.view.deadline
        while self._crew.common(self._behind(state, until)):
            time.sleep(_POLL_S)
            state, _ = self.meet(state, settle=True)
        return state

    def _is_time(self, state: IslandState) -> bool:
        """Return whether the processes of the island look now what has happened: an island of one
        process after each step, others when something is due, and a few times in between."""
        if jax.process_count() == 1:
            return True
        dues = [x.due for x in self._pending.values()]
        stride = max(1, self._outer.every // len(self._programs) // _CHECKS)
        at = min([*dues, self._outer.start_of(state.round)])
        return state.clock >= at or state.clock % stride == 0

    def _alone(self, late: Sequence[Exchange]) -> set[str]:
        """Return "alone" if the island goes on without waiting for exchanges that are due: the
        coordinator is lost, or decides nothing, as one whose disk is full."""
        membership, deadline = self._membership, self._membership.view.deadline
        lost = membership.alone_s > deadline or membership.is_closed
        stuck = all(time.monotonic() > x.began + _PATIENCE * deadline for x in late)
        return {"alone"} if lost or stuck else set()

    def _behind(self, state: IslandState, until: float) -> set[str]:
        """Return "behind" if there is something to catch up, and somebody who has it."""
        membership = self._membership
        lacks = any(self.catch_up.lacks(state, p) for p in range(len(state.versions)))
        others = any(place.slot != membership.report.slot for place in membership.view.living)
        there = membership.is_connected and others and not membership.is_closed
        return {"behind"} if lacks and there and time.monotonic() < until else set()

    def _names(self, state: IslandState, settle: bool) -> set[str]:
        """Return what has happened in this process, as "what number" each."""
        found: set[str] = set()
        for number, pending in self._pending.items():
            if pending.has_ended:
                if pending.error is not None:
                    raise pending.error
                if pending.mean is None:
                    found.add(f"drop {number}")
                elif settle or state.clock >= pending.due:
                    found.add(f"merge {number}")
        view, number = self._membership.view, state.round
        fragment = number % len(self._programs)
        busy = {n % len(self._programs) for n in self._pending}
        if self._membership.is_connected and view.round > number:
            found.add(f"skip {view.round}")
        elif fragment not in busy and not self.catch_up.lacks(state, fragment):
            closes_in = self._membership.closes_in if view.round == number else None
            hurry = closes_in is not None and (self.is_late or closes_in < 2 * self.step_s)
            if state.clock >= self._outer.start_of(number) or hurry:
                found.add(f"start {number}")
        found |= self.catch_up.names(state, busy)
        for name in self._answers.names(state):
            if name.startswith(INNER):  # All processes give what they have after the same step.
                found.add(f"answer {name}")
            else:  # Its version says what it is.
                self._answers.answer(name, state)
        return found

    def _deal(self, state: IslandState, name: str) -> tuple[IslandState, dict[str, Any]]:
        """Deal with one thing that has happened in all processes of the island."""
        what, _, rest = name.partition(" ")
        match what:
            case "merge":
                return self._merge(state, int(rest))
            case "drop":
                self._drop(state, int(rest))
            case "start":
                return self._start(state, int(rest)), {}
            case "skip":
                clock = max(state.clock, self._outer.start_of(int(rest) - 1))
                self.is_late = True
                return dataclasses.replace(state, round=int(rest), clock=clock), {}
            case "answer":
                self._answers.answer(rest, state)
            case _:
                return self.catch_up.deal(state, name), {}
        return state, {}

    def _start(self, state: IslandState, number: int) -> IslandState:
        """Take part in a round. Its clock is the islands' clock from now on."""
        fragment, clock = number % len(self._programs), self._outer.start_of(number)
        self.is_late = False
        programs, mine = self._programs[fragment], state.outer[fragment]
        self._pending[number] = Exchange(
            number,
            programs,
            self._membership,
            programs.difference(programs.leaves_of(state.inner.params), mine.copy),
            mine,
            num_rows=self.num_rows - self._rows_at.get(fragment, 0),
            due=clock + self._outer.delay,
        )
        return dataclasses.replace(state, round=number + 1, clock=clock)

    def _drop(self, state: IslandState, number: int) -> None:
        """Forget an exchange of which there is no result. What the island has changed counts in the
        next one, unless others have gone on from it."""
        pending, fragment = self._pending.pop(number), number % len(self._programs)
        if pending.counted:
            self._count(fragment, pending)
            self.catch_up.rebase(fragment, state.outer[fragment].copy - pending.difference)

    def _count(self, fragment: int, pending: Exchange) -> None:
        """Note that the rows of an exchange have counted."""
        self._rows_at[fragment] = self._rows_at.get(fragment, 0) + pending.num_rows

    def _merge(self, state: IslandState, number: int) -> tuple[IslandState, dict[str, Any]]:
        """Merge the result of an exchange."""
        pending, fragment = self._pending.pop(number), number % len(self._programs)
        programs, mine, found = self._programs[fragment], state.outer[fragment], pending.mean
        assert isinstance(found, Mean)
        own = programs.leaves_of(state.inner.params)
        changed, copy, opt_state, bits = programs.merge(own, found.mean, mine.copy, mine.opt_state)
        version = number + 1
        state = state.with_leaves(changed).with_version(fragment, version)
        state = state.with_fragment(
            fragment,
            copy=copy,
            opt_state=opt_state,
            error=found.error,
            mean_error=found.mean_error,
        )
        self._count(fragment, pending)
        self._membership.note("checksums", fragment, (version, checksum(bits)))
        oldest = min(self._pending, default=number + 1)
        self._membership.post.forget(functools.partial(_is_before, oldest))
        return state, {
            "outer_bytes": found.num_bytes,
            "outer_s": found.seconds,
            "outer_islands": found.num_islands,
        }


def _is_before(round: int, name: str) -> bool:
    """Return whether a name is one of an exchange of an earlier round."""
    number, _, _ = name.partition("/")
    return number.isdecimal() and int(number) < round
