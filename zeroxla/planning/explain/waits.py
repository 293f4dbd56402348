"""`waits_of`: for which events of the links the computation of a step waits, and for how long.

Computation that begins later than it could has waited: for the event that ends when it begins, and
before that for what this event itself has waited for, such as the hop before it or the transfer
before it on its link. So the waits of all events add up to the time in which nothing is computed.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from zeroxla.planning.lanes import COMPUTE, Event

ENDS = 0.02
"""The first and the last of the model's computation, so much of it, count as the ends of a step.
What travels there has nothing to run beside."""

_LATER = frozenset({"update", "owners"})
"""The phases that follow when the gradients are there."""

BEGIN, MIDDLE, END = "begin", "middle", "end"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A span in which nothing is computed.

    Attributes:
      start_s, end_s: the span, in seconds since the step began.
      event: the event of a link that it waits for; None if no link is taken.
      place: `BEGIN` or `END` of the step, where nothing can hide the event, or `MIDDLE`. What a
        link has left over when the computation ends, its last event aside, is of the middle.
    """

    start_s: float
    end_s: float
    event: Event | None
    place: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def waits_of(events: Sequence[Event], end_s: float) -> list[Wait]:
    """Return the waits of a step, in order.

    Args:
      events: the events of all lanes.
      end_s: when the step is over.
    """
    computing = sorted((e for e in events if e.lane == COMPUTE), key=lambda e: e.start_s)
    links = [_Link(mine) for mine in _by_lane(e for e in events if e.lane != COMPUTE)]
    close = max(end_s, 1e-9) * 1e-9
    first, last = _ends(computing)
    of_gradients = [e for e in events if e.lane != COMPUTE and e.phase not in _LATER]
    last_of = {id(max(mine, key=lambda e: e.end_s)) for mine in _by_lane(of_gradients)}
    found: list[Wait] = []
    for start, end in _gaps(computing, end_s, close):
        place = BEGIN if end <= first else END if start >= last else MIDDLE
        for a, b, event in reversed(list(_blamed(start, end, links, close))):
            is_left_over = place == END and event is not None and id(event) not in last_of
            where = MIDDLE if is_left_over else place
            found.append(Wait(start_s=a, end_s=b, event=event, place=where))
    return found


def _ends(computing: Sequence[Event]) -> tuple[float, float]:
    """Return when the first share of the model's computation is done, and when only the last share
    is left."""
    model = [e for e in computing if e.phase not in _LATER]
    if not model:
        return 0.0, 0.0
    total = sum(e.end_s - e.start_s for e in model)
    done, first, last = 0.0, model[0].start_s, model[-1].end_s
    for event in model:
        before, done = done, done + event.end_s - event.start_s
        if before <= ENDS * total:
            first = event.start_s
        if done >= (1 - ENDS) * total:
            last = min(last, event.end_s)
    return first, last


def _gaps(computing: Sequence[Event], end_s: float, close: float) -> Iterator[tuple[float, float]]:
    """Yield the spans in which nothing is computed."""
    free = 0.0
    for event in computing:
        if event.start_s > free + close:
            yield free, event.start_s
        free = max(free, event.end_s)
    if end_s > free + close:
        yield free, end_s


def _blamed(
    start: float, end: float, links: Sequence[_Link], close: float
) -> Iterator[tuple[float, float, Event | None]]:
    """Yield the parts of a gap, the last one first, each with what it waits for."""
    while end > start + close:
        there = [event for link in links if (event := link.at(end, close)) is not None]
        if there:
            # The one that ends here is waited for; of several the one that began last.
            event = min(there, key=lambda e: (e.end_s > end + close, e.end_s, -e.start_s))
            begin = max(start, event.start_s)
            yield begin, end, event
        else:
            begin = max([start, *(link.last_end(end, close) for link in links)])
            yield begin, end, None
        end = begin


class _Link:
    """The events of one lane, by time."""

    def __init__(self, events: list[Event]) -> None:
        self._events = sorted(events, key=lambda e: e.end_s)
        self._ends = [e.end_s for e in self._events]

    def at(self, second: float, close: float) -> Event | None:
        """Return the event that runs just before a second."""
        i = bisect.bisect_left(self._ends, second - close)
        if i < len(self._events) and self._events[i].start_s < second - close:
            return self._events[i]
        return None

    def last_end(self, second: float, close: float) -> float:
        """Return when the last event before a second ends; 0 if there is none."""
        i = bisect.bisect_left(self._ends, second - close)
        return self._ends[i - 1] if i else 0.0


def _by_lane(events: Iterable[Event]) -> list[list[Event]]:
    lanes: dict[str, list[Event]] = {}
    for event in events:
        if event.end_s > event.start_s:
            lanes.setdefault(event.lane, []).append(event)
    return list(lanes.values())
