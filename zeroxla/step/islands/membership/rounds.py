"""`Rounds`: decides who takes part in which round. It knows no network and no clock but what it is
told.

All decisions follow from the last report of each process, from the ledger and from the time. A
round is open until each island that trains is ready for it, or the deadline is over. Then those
that are ready exchange. If all who are still there hold the same result, the round is closed, and
they merge it; if one is lost or blamed, the others exchange again without it. So either all who
took part merge the same result, or none does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zeroxla.step.islands.membership.attempt import Attempt, Held
from zeroxla.step.islands.membership.ledger import Ledger
from zeroxla.step.islands.membership.messages import Closed, MemberReport, Position, View
from zeroxla.step.islands.membership.roll import Island, Roll

_REUNION_S = 2.0


class Rounds:
    """The coordinator's mind.

    Args:
      ledger: what it was before.
      num_islands: islands that must be there before the first round.
      deadline: seconds that a round waits for an island.

    Attributes:
      ledger: what must be saved before views go out.
      events: what has happened, for people.
    """

    def __init__(self, ledger: Ledger, *, num_islands: int, deadline: float) -> None:
        self.ledger = dataclasses.replace(ledger, lives=ledger.lives + 1, started=False)
        self.events: list[dict[str, Any]] = []
        self._num_islands, self._deadline = num_islands, deadline
        self._roll = Roll()
        self._num_attempts = 0
        self._met_at: float | None = None
        self._orphaned: dict[int, float] = {}  # Fragments whose newest version nobody has, since.
        self._awaited: set[int] = set()  # Those that were there at the start, until they train.
        self._opened_at: float | None = None
        self._attempt: Attempt | None = None

    def heard(self, member: int, report: MemberReport, host: str, now: float) -> None:
        """Take the report of a process.

        Args:
          member: the number of the process.
          report: what it says.
          host: where it calls from.
          now: the time in seconds.
        """
        found = self._roll.heard(member, report, host, self.ledger.facts)
        if found is None:
            return
        report, is_new = found
        if not report.facts.keys() <= self.ledger.facts.keys():
            facts = {**report.facts, **self.ledger.facts}
            self.ledger = dataclasses.replace(self.ledger, facts=facts)
        self._met_at = now if self._met_at is None else self._met_at
        if is_new:
            self._note("joined", slot=report.slot, process=report.process)
        if self.ledger.started and len(report.versions) == len(self.ledger.versions):
            self._catch_up(report)

    def lost(self, member: int) -> None:
        """Forget a process that has left. After the last one that trains the run begins again."""
        if (report := self._roll.lost(member)) is None:
            return
        self._note("lost", slot=report.slot, process=report.process)
        if report.trains and not self._roll.training():
            self.ledger = dataclasses.replace(self.ledger, started=False)
            self._attempt = self._opened_at = None
            self._met_at = None

    def decide(self, now: float) -> bool:
        """Decide what can be decided; return whether anything was. Save the ledger then."""
        before, changed = self.ledger, False
        while self._turn(now):
            changed = True
        return changed or before is not self.ledger

    def next_time(self) -> float | None:
        """Return when there is something to decide if nothing is heard until then."""
        if self._attempt is not None:
            return self._attempt.began + 2 * self._deadline
        if not self.ledger.started and self._met_at is not None and self.ledger.versions:
            return self._met_at + self._reunion
        times = [*self._orphaned.values()]
        times += [] if self._opened_at is None else [self._opened_at]
        return min(times) + self._deadline if times else None

    def view(self, member: int, now: float) -> View | None:
        """Return what a process is told; None if it is not known."""
        if why := self._roll.refused.get(member):
            return View(slot=0, refused=why, deadline=self._deadline)
        report = self._roll.report_of(member)
        if report is None or report.slot is None:
            return None
        ledger, opened = self.ledger, self._opened_at
        astray = self._roll.astray(ledger.versions)
        return View(
            slot=report.slot,
            knows=bool(report.facts),
            started=ledger.started,
            deadline=self._deadline,
            round=ledger.round,
            versions=ledger.versions,
            closes_in=None if opened is None else max(0.0, opened + self._deadline - now),
            attempt="" if self._attempt is None else self._attempt.name,
            roster=() if self._attempt is None else tuple(self._attempt.roster.values()),
            closed=ledger.closed,
            living=tuple(
                self._roll.place(slot, hidden=astray.get(slot, ()))
                for slot in sorted(self._roll.training())
            ),
            astray=astray.get(report.slot, ()),
            position=ledger.positions.get(report.slot, Position()),
            counted=ledger.counted.get(report.slot, (0,) * len(ledger.versions)),
        )

    @property
    def _reunion(self) -> float:
        """Seconds in which the islands of a run that has begun come again: those that train, after
        the coordinator was away; or all, after the last one had left."""
        trains = bool(self._roll.training())
        return min(self._deadline, _REUNION_S) if trains else self._deadline

    def _catch_up(self, report: MemberReport) -> None:
        """Learn from an island what the ledger has lost: its file may be older than the run."""
        ledger = self.ledger
        if any(a > b for a, b in zip(report.versions, ledger.versions, strict=True)):
            newest = tuple(map(max, report.versions, ledger.versions))
            number = max(ledger.round, report.round)
            self.ledger = dataclasses.replace(ledger, versions=newest, round=number)

    def _turn(self, now: float) -> bool:
        """Decide one thing; return whether there was one."""
        islands = self._roll.islands()
        if not self.ledger.started:
            return self._start(islands, now)
        if self._attempt is None:
            return self._go_back(islands, now) or self._gather(islands, now)
        return self._exchange(self._attempt, islands, now)

    def _start(self, islands: Mapping[int, Island], now: float) -> bool:
        """Begin the run when enough islands are there. One that has begun before waits for nobody
        long. If no island trains, the newest of those that are there is where the run goes on,
        whatever was before."""
        trains = bool(self._roll.training())
        is_new = not trains and not self.ledger.versions
        patient = is_new or now < (self._met_at or 0) + self._reunion
        if not islands or (len(islands) < self._num_islands and patient):
            return False
        each = [process for island in islands.values() for process in island]
        known = [self.ledger.versions] if trains and self.ledger.versions else []
        newest = tuple(map(max, zip(*(process.versions for process in each), *known, strict=True)))
        number = max([process.round for process in each] + [self.ledger.round] * bool(known))
        self.ledger = dataclasses.replace(
            self.ledger,
            started=True,
            round=number,
            versions=newest,
            closed=self.ledger.closed if known else {},
        )
        self._awaited = set(islands)
        self._note("started", slots=sorted(islands), round=number)
        return True

    def _go_back(self, islands: Mapping[int, Island], now: float) -> bool:
        """Forget rounds whose results nobody has any more: all that had merged them are lost. They
        may come back within the deadline."""
        ledger, newest = self.ledger, list(self.ledger.versions)
        for fragment, version in enumerate(ledger.versions):
            there = [min(p.versions[fragment] for p in island) for island in islands.values()]
            if not there or max(there) >= version:
                self._orphaned.pop(fragment, None)
            elif now >= self._orphaned.setdefault(fragment, now) + self._deadline:
                newest[fragment] = max(there)
        if tuple(newest) == ledger.versions:
            return False
        self.ledger = dataclasses.replace(ledger, versions=tuple(newest))
        self._note("gone back", versions=newest)
        return True

    def _gather(self, islands: Mapping[int, Island], now: float) -> bool:
        """Wait until islands are ready for the open round, and let them exchange."""
        ledger = self.ledger
        number, fragment = ledger.round, ledger.round % len(ledger.versions)
        current = {
            slot: island
            for slot, island in islands.items()
            if all(process.versions[fragment] == ledger.versions[fragment] for process in island)
        }
        ready = {s for s, island in current.items() if all(number in p.ready for p in island)}
        self._awaited &= islands.keys() - self._roll.training().keys()
        waited = self._awaited | (current.keys() & self._roll.training().keys())
        if not ready:
            changed, self._opened_at = self._opened_at is not None, None
            return changed
        if self._opened_at is None:
            self._opened_at = now
            return True
        if not waited <= ready and now < self._opened_at + self._deadline:
            return False
        self._begin(ready, now)
        return True

    def _exchange(self, attempt: Attempt, islands: Mapping[int, Island], now: float) -> bool:
        """Close the round when all who are still there hold the same; or let some try again."""
        outcome = attempt.outcome(islands, is_late=now >= attempt.began + 2 * self._deadline)
        if isinstance(outcome, Held):
            self._close(attempt, outcome.digests, islands, now)
        elif outcome is not None:
            self._begin(outcome, now)
        return outcome is not None

    def _begin(self, slots: set[int], now: float) -> None:
        """Let islands exchange. If there are none the round is open again."""
        number, self._attempt = self.ledger.round, None
        if slots:
            self._num_attempts += 1
            weights = {
                slot: max(1, max(process.ready.get(number, 1) for process in island))
                for slot, island in self._roll.islands().items()
            }
            self._attempt = Attempt(
                number=number,
                name=f"{number}/{self.ledger.lives}.{self._num_attempts}",
                roster={slot: self._roll.place(slot, weights[slot]) for slot in sorted(slots)},
                began=now,
            )
        else:
            self._opened_at = None

    def _close(
        self,
        attempt: Attempt,
        digests: tuple[str, ...],
        islands: Mapping[int, Island],
        now: float,
    ) -> None:
        """Close the open round."""
        ledger, number = self.ledger, self.ledger.round
        fragment = number % len(ledger.versions)
        versions = list(ledger.versions)
        versions[fragment] = number + 1
        closed = Closed(round=number, attempt=attempt.name, digests=digests)
        positions, counted = {}, dict(ledger.counted)
        for slot in attempt.roster:
            before = counted.get(slot, (0,) * len(versions))
            counted[slot] = (*before[:fragment], number + 1, *before[fragment + 1 :])
            if slot in islands:
                self._roll.promise(slot, fragment, versions[fragment])
                positions[slot] = islands[slot][0].position
        self.ledger = dataclasses.replace(
            ledger,
            round=number + 1,
            versions=tuple(versions),
            closed={**ledger.closed, fragment: closed},
            positions={**ledger.positions, **positions},
            counted=counted,
        )
        self._note(
            "closed",
            round=number,
            slots=sorted(attempt.roster),
            left_out=sorted(self._roll.training().keys() - attempt.roster.keys()),
            rows={slot: place.rows for slot, place in attempt.roster.items()},
            seconds=round(now - (self._opened_at or now), 3),
        )
        self._attempt = self._opened_at = None

    def _note(self, what: str, **facts: Any) -> None:
        self.events.append({"what": what, **facts})
