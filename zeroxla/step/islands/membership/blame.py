"""Which islands are left out of an exchange that some could not finish."""

from __future__ import annotations

from collections.abc import Mapping


def to_leave_out(failed: Mapping[int, tuple[int, set[int]]]) -> set[int]:
    """Return islands without whom nobody has a reason to fail again.

    An island that has failed in the first move sends nothing in the second, so only blames for the
    earliest move count.

    A connection joins two islands, and nobody knows on which side it fails. So the island of which
    most are said is left out first. Of equals it is the one with the larger number.

    Args:
      failed: by slot, the move in which it failed, and the islands that it could not exchange with.
    """
    earliest = min((move for move, _ in failed.values()), default=0)
    first = {slot: blamed for slot, (move, blamed) in failed.items() if move == earliest}
    found = {slot for slot, blamed in first.items() if not blamed - {slot}}
    pairs = {frozenset((a, b)) for a, blamed in first.items() for b in blamed - {a}}
    while pairs := {pair for pair in pairs if not pair & found}:
        named = [slot for pair in pairs for slot in pair]
        found.add(max(named, key=lambda slot: (named.count(slot), slot)))
    return found
