"""How long islands wait for their exchanges: the time line of training steps and one link.

An island computes step after step, and has a link to the others that sends one piece after another,
in the order in which they become ready. What it needs and has not received, it waits for.
"""

from __future__ import annotations

import dataclasses
import math

from zeroxla.config.outer import Outer

_TURNS = 4
"""Turns of `every` steps that are timed, after as many that are not: the first ones find a link
that nothing has taken yet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes of an exchange that become ready at once, and are needed at once.

    Attributes:
      num_bytes: what an island sends of it; it receives as much at the same time.
      ready: the share of the exchange's step that is computed when the piece is ready, in [0, 1].
      needed: the share of the step after `delay` others that can be computed without it, in [0, 1].
    """

    num_bytes: float
    ready: float = 1.0
    needed: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeTime:
    """The exchanges of an island in time.

    An `Island` begins an exchange after a step, and merges its result after `delay` more, so its
    fragments are one piece each. Other programs are described by several pieces: one that reduces
    layer by layer, during backward, has a piece for each layer.

    Attributes:
      outer: when exchanges start and end.
      fragments: the pieces of each fragment.
      step_s: seconds of a training step.
      latency_s: seconds for which a piece is under way besides its bytes.
    """

    outer: Outer
    fragments: tuple[tuple[Piece, ...], ...]
    step_s: float
    latency_s: float = 0.0

    def seconds(self, bytes_per_s: float) -> float:
        """Return the seconds that the longest exchange takes the link."""
        return max(
            sum(self.latency_s + piece.num_bytes / bytes_per_s for piece in pieces)
            for pieces in self.fragments
        )

    def hidden_s(self, bytes_per_s: float) -> float:
        """Return the seconds of the longest exchange that pass while `delay` steps are computed,
        if no other exchange is before it."""
        return min(self.seconds(bytes_per_s), self.outer.delay * self.step_s)

    def utilization(self, bytes_per_s: float) -> float:
        """Return the share of the time in which an island computes, with a link of this rate."""
        events = self._events()
        waited = link_free = waited_before = 0.0
        arrived: dict[tuple[int, _Place], float] = {}
        for turn in range(2 * _TURNS):
            if turn == _TURNS:
                waited_before = waited
            for event in events:
                key = turn - event.turns_ago, event.place
                now = (turn * self.outer.every + event.at) * self.step_s + waited
                if event.num_bytes is None:
                    waited += max(arrived.pop(key, now) - now, 0.0)
                else:
                    begin = max(link_free, now)
                    link_free = begin + self.latency_s + event.num_bytes / bytes_per_s
                    arrived[key] = link_free
        computed = _TURNS * self.outer.every * self.step_s
        return computed / (computed + waited - waited_before)

    def needed_bytes_per_s(self, utilization: float = 0.95) -> float:
        """Return the rate of a link with which an island computes for a share of the time.

        Args:
          utilization: the share, above 0 and below 1.

        Returns:
          The least such rate; infinity if latency alone takes more.

        Raises:
          ValueError: the share is out of range.
        """
        if not 0 < utilization < 1:
            raise ValueError(f"utilization={utilization}: give a share between 0 and 1")
        sent = sum(piece.num_bytes for pieces in self.fragments for piece in pieces)
        if not sent:
            return 0.0
        if self.utilization(math.inf) < utilization:
            return math.inf
        # The link cannot send more than it does in the whole time.
        low = high = sent * utilization / (self.outer.every * self.step_s)
        while self.utilization(high) < utilization:
            low, high = high, 2 * high
        while high > 1.0001 * low:
            middle = math.sqrt(low * high)
            if self.utilization(middle) < utilization:
                low = middle
            else:
                high = middle
        return high

    def _events(self) -> list[_Event]:
        """Return what happens in each turn of `every` steps, in order."""
        every, found = self.outer.every, []
        for fragment, pieces in enumerate(self.fragments):
            start = self.outer.start_of(fragment)
            for i, piece in enumerate(pieces):
                place = fragment, i
                found.append(_Event(start - 1 + piece.ready, 0, place, piece.num_bytes))
                end = start + self.outer.delay + piece.needed
                # A turn has its last moment, and not its first one.
                turns = math.ceil(end / every) - 1
                found.append(_Event(end - turns * every, turns, place, None))
        # At the same moment an exchange begins before another one is merged.
        return sorted(found, key=lambda event: (event.at, event.num_bytes is None))


_Place = tuple[int, int]
"""The number of a fragment, and of a piece in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Event:
    """A piece becomes ready, or is needed.

    Attributes:
      at: the number of steps of the turn that are computed by then.
      turns_ago: the number of turns since the piece's exchange began.
      place: the piece.
      num_bytes: the bytes that become ready; None if the piece is needed.
    """

    at: float
    turns_ago: int
    place: _Place
    num_bytes: float | None
