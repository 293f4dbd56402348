"""`Attempt`: an exchange under way, and what has become of it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from zeroxla.step.islands.membership.blame import to_leave_out
from zeroxla.step.islands.membership.messages import Place
from zeroxla.step.islands.membership.roll import Island


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """All who are still there hold the same result.

    Attributes:
      digests: its digest, by process of an island.
    """

    digests: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An exchange under way.

    Attributes:
      number: the number of the round.
      name: the name of the attempt.
      roster: who takes part, by slot.
      began: when it began.
    """

    number: int
    name: str
    roster: Mapping[int, Place]
    began: float

    def outcome(self, islands: Mapping[int, Island], *, is_late: bool) -> Held | set[int] | None:
        """Return what has become of it.

        Args:
          islands: those that are there.
          is_late: whether those that have said nothing are not waited for any more.

        Returns:
          `Held`; the slots of those that exchange again, without who is lost or blamed; or None if
          it is still under way.
        """
        there = {slot for slot in self.roster if slot in islands}
        done: dict[int, tuple[str, ...]] = {}
        failed: dict[int, tuple[int, set[int]]] = {}
        for slot in there:
            held = [p.held.get(self.number, ("", "")) for p in islands[slot]]
            if all(of == self.name for of, _ in held):
                done[slot] = tuple(digest for _, digest in held)
            said = [p.failed.get(self.number, ("", 0, ())) for p in islands[slot]]
            if blames := [(move, slots) for of, move, slots in said if of == self.name]:
                move = min(move for move, _ in blames)
                failed[slot] = move, {s for of, slots in blames if of == move for s in slots}
        if there and there == done.keys():
            counts = collections.Counter(done[slot] for slot in sorted(there))
            digests = counts.most_common(1)[0][0]
            if len(counts) == 1:
                return Held(digests=digests)
            return {slot for slot in there if done[slot] == digests}
        if there != self.roster.keys():
            return there
        if is_late or there <= done.keys() | failed.keys():
            silent = there - done.keys() - failed.keys()
            return there - (silent or to_leave_out(failed))
        return None
