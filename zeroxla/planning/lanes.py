"""The lanes of one device (its computation, its links), and the events that take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from zeroxla.program.phases import phase_of

COMPUTE = "compute"
"""The lane of the device's computation."""

BOUND_BY_MEMORY = "compute, bound by memory"
"""The part of `COMPUTE` in which the device waits for its memory. It is counted like a lane, and is
none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that takes a lane.

    Attributes:
      lane: `COMPUTE`, a mesh axis for its link, or one of the host's lanes in `target.py`.
      phase: one of `zeroxla.program.phases.PHASES`.
      start_s, end_s: seconds since the step began.
      what: what takes the lane, as a reader of events wants to know it; None if nobody asked.
    """

    lane: str
    phase: str
    start_s: float
    end_s: float
    what: Any = None

    def between(self, start_s: float, end_s: float) -> Event:
        """Return the event at another time."""
        return Event(self.lane, self.phase, start_s, end_s, self.what)

    def later(self, seconds: float) -> Event:
        """Return the event, moved to later."""
        return self.between(self.start_s + seconds, self.end_s + seconds)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeLine:
    """One step on one device.

    Attributes:
      seconds: the length of the step.
      busy_s: the seconds for which each lane is taken.
      memory_s: the seconds for which the device computes as fast as its memory allows, not as its
        arithmetic does; a part of `busy_s[COMPUTE]`.
      events: the events that take lanes, in the order in which they were simulated.
    """

    seconds: float
    busy_s: Mapping[str, float]
    memory_s: float = 0.0
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How far the lanes were at one moment of a simulation.

    Attributes:
      latest_s: seconds at which everything so far is done.
      busy_s: the seconds for which each lane has been taken.
      num_events: the number of events so far.
    """

    latest_s: float
    busy_s: Mapping[str, float]
    num_events: int


class Lanes:
    """Says who takes which lane until when.

    Args:
      overlaps: whether the links work while the device computes. If not, everything waits for
        `COMPUTE`, and takes it.
      shared: by lane, the lane whose link it takes too; other lanes have links of their own.
      fills: whether what is ready early takes a link in a pause that is long enough, though later
        things were simulated before it. If not, a link is taken in the order of the simulation.
    """

    def __init__(
        self, *, overlaps: bool, shared: Mapping[str, str] | None = None, fills: bool = False
    ) -> None:
        self._overlaps, self._fills = overlaps, fills
        self._shared = shared or {}
        self._free_s: dict[str, float] = {}
        self._pauses: dict[str, tuple[tuple[float, float], ...]] = {}
        self.busy_s: dict[str, float] = {}
        self.events: list[Event] = []

    def take(
        self,
        lane: str,
        start: float,
        seconds: float,
        path: str,
        kind: str = "",
        what: Any = None,
    ) -> float:
        """Take a lane as soon as it is free; return the second at which the work is done.

        Args:
          lane: the lane.
          start: the second before which the work cannot begin.
          seconds: how long the lane is taken.
          path, kind: path of scopes and kind of collective, from which the event's phase follows.
          what: what takes the lane; see `Event`.
        """
        taken = self._shared.get(lane, lane) if self._overlaps else COMPUTE
        start = self._begin(taken, start, seconds)
        end = start + seconds
        self._free_s[taken] = max(end, self._free_s.get(taken, 0.0))
        self.busy_s[lane] = self.busy_s.get(lane, 0.0) + seconds
        if seconds:
            self.events.append(Event(lane, phase_of(path, kind), start, end, what))
        return end

    def put_off(self, lane: str, start: float, seconds: float, path: str, what: Any) -> float:
        """Record something small that begins at `start` or later, whenever the lane has room: it
        holds nothing up. Return when it is done at the earliest."""
        self.busy_s[lane] = self.busy_s.get(lane, 0.0) + seconds
        if seconds:
            self.events.append(Event(lane, phase_of(path, ""), start, start + seconds, what))
        return start + seconds

    def _begin(self, link: str, start: float, seconds: float) -> float:
        """Return when something that is ready at `start` can take a link, and note the pauses that
        are left."""
        free = self._free_s.get(link, 0.0)
        if not self._fills or link == COMPUTE:
            return max(start, free)
        pauses = list(self._pauses.get(link, ()))
        for i, (a, b) in enumerate(pauses):
            begin = max(a, start)
            if begin + seconds <= b:
                left = ((a, begin), (begin + seconds, b))
                pauses[i : i + 1] = [(x, y) for x, y in left if x < y]
                self._pauses[link] = tuple(pauses)
                return begin
        if start > free:
            self._pauses[link] = (*pauses, (free, start))
        return max(start, free)

    def free_at(self, lane: str) -> float:
        """Return the second from which on a lane is free."""
        return self._free_s.get(self._shared.get(lane, lane) if self._overlaps else COMPUTE, 0.0)

    def wait_for_memory(self, seconds: float) -> None:
        """Record that the device waits for its memory in so many seconds of `COMPUTE`."""
        self.busy_s[BOUND_BY_MEMORY] = self.busy_s.get(BOUND_BY_MEMORY, 0.0) + seconds

    def timeline(self) -> TimeLine:
        """Return the time line of all that took lanes."""
        busy_s = dict(self.busy_s)
        memory_s = busy_s.pop(BOUND_BY_MEMORY, 0.0)
        return TimeLine(
            seconds=self.free_s(), busy_s=busy_s, memory_s=memory_s, events=tuple(self.events)
        )

    def free_s(self) -> float:
        """Return the second at which all lanes are free."""
        return max(self._free_s.values(), default=0.0)

    def copy(self) -> Lanes:
        """Return lanes in the same state, to come back to."""
        copied = Lanes(overlaps=self._overlaps, shared=self._shared, fills=self._fills)
        copied.become(self)
        return copied

    def become(self, other: Lanes) -> None:
        """Take the state of other lanes."""
        self._free_s, self.busy_s = dict(other._free_s), dict(other.busy_s)
        self.events, self._pauses = list(other.events), dict(other._pauses)

    def mark(self, ends: list[float]) -> Mark:
        """Return how far the lanes are, and the results that are there at `ends`."""
        return Mark(
            latest_s=max([self.free_s(), *ends]),
            busy_s=dict(self.busy_s),
            num_events=len(self.events),
        )

    def repeat(self, before: Mark, after: Mark, times: float) -> float:
        """Repeat the events between two marks `times` times; return the seconds that this adds.

        One repetition takes as long as the first one did, or as the lane that is taken longest.
        """
        busy_s = {lane: after.busy_s[lane] - before.busy_s.get(lane, 0.0) for lane in after.busy_s}
        of_links = on_links(busy_s, self._shared)
        step = max([after.latest_s - before.latest_s, *of_links.values()])
        repeated = _joined(self.events[before.num_events :])
        for lane, seconds in busy_s.items():
            self.busy_s[lane] = after.busy_s[lane] + times * seconds
        self.events += _repeated(repeated, step, round(times))
        self._free_s = {lane: free + times * step for lane, free in self._free_s.items()}
        self._pauses = {}
        return times * step

    def run_early(self, start: float, run: Callable[[], list[float]]) -> float:
        """Run something that an earlier turn has room for; return the second at which it is done.

        It waits for no lane and holds up no link. The device computes for as long as it takes.

        Args:
          start: the second at which it would begin in its own turn; its events are moved there.
          run: takes lanes from second 0 on; returns the seconds at which its results are there.
        """
        taken, self._free_s = self._free_s, {}
        pauses, self._pauses = self._pauses, {}
        first = len(self.events)
        ends = run()
        seconds = max([*self._free_s.values(), *ends], default=0.0)
        self.events[first:] = [event.later(start) for event in self.events[first:]]
        self._free_s = {**taken, COMPUTE: taken.get(COMPUTE, 0.0) + seconds}
        self._pauses = pauses
        return start + seconds


def on_links(busy_s: Mapping[str, float], shared: Mapping[str, str]) -> dict[str, float]:
    """Return for how long links are taken, from the seconds of lanes; lanes that share a link add
    up."""
    found: dict[str, float] = {}
    for lane, seconds in busy_s.items():
        link = shared.get(lane, lane)
        found[link] = found.get(link, 0.0) + seconds
    return found


def _joined(events: list[Event]) -> list[Event]:
    """Return events in which those of one lane and phase that follow each other are one, if they
    are of the same thing."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if last is not None and (last.lane, last.phase, last.end_s, last.what) == (
            event.lane,
            event.phase,
            event.start_s,
            event.what,
        ):
            found[-1] = last.between(last.start_s, event.end_s)
        else:
            found.append(event)
    return found


def _repeated(events: list[Event], step: float, times: int) -> list[Event]:
    """Return events again, `times` times, each time by `step` seconds later. One that takes all of
    a step goes on, and stays one."""
    if len(events) == 1 and times and events[0].end_s - events[0].start_s >= step * (1 - 1e-9):
        (event,) = events
        return [event.between(event.start_s + step, event.end_s + times * step)]
    return [event.later(k * step) for k in range(1, times + 1) for event in events]
