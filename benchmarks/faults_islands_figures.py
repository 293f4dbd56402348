"""The disturbances that faults_islands.py plans, and the figures that it computes from its logs.

Pure functions, without JAX and without a clock.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PHASES = ("computing", "exchanging", "joining", "computing", "exchanging")
"""In which an island is killed, in turn. "joining" kills it twice: anywhere, and as it is back."""
SHORT_CUT, LONG_CUT, AWAY = 0.6, 2.5, 1.0
"""The length of cuts, and of the coordinator's absence, in deadlines."""
Event = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """Something that happens to a run.

    Attributes:
      at: when, in seconds from its beginning.
      kind: "kill", "cut" or "coordinator".
      slot: the island; -1 for the coordinator.
      phase: of `PHASES`, for a kill.
      seconds: until it is mended, for the other kinds.
    """

    at: float
    kind: str
    slot: int = -1
    phase: str = ""
    seconds: float = 0.0


def disturbances(
    seconds: float, every: float, islands: int, deadline: float, seed: int
) -> list[Disturbance]:
    """Return what happens in a run: a kill of an island each `every` seconds, two cuts of a link,
    and two deaths of the coordinator.

    Args:
      seconds: the length of the run.
      every: seconds between two kills.
      islands: the number of islands.
      deadline: the coordinator's.
      seed: chooses the islands.
    """
    random_ = random.Random(seed)
    found, number = [], 1
    while number * every < seconds - 1:
        phase = PHASES[(number - 1) % len(PHASES)]
        at = number * every
        found.append(Disturbance(at=at, kind="kill", slot=random_.randrange(islands), phase=phase))
        number += 1
    for share, length in ((0.3, SHORT_CUT), (0.6, LONG_CUT)):
        slot = random_.randrange(islands)
        length_s = length * deadline
        found.append(Disturbance(at=share * seconds, kind="cut", slot=slot, seconds=length_s))
    for share in (0.45, 0.8):
        found.append(Disturbance(at=share * seconds, kind="coordinator", seconds=AWAY * deadline))
    return sorted(found, key=lambda each: each.at)


def closed_rounds(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the closed rounds that coordinators told of, each with "at", in the order of time."""
    found = [{**e["event"], "at": e["at"]} for e in events if e["what"] == "event"]
    return sorted((e for e in found if e["what"] == "closed"), key=lambda e: e["at"])


def credited(rounds: Iterable[Event], fragments: int) -> list[tuple[float, float]]:
    """Return (time, rows that count until then), a pair for each round.

    A round counts the rows that each island has trained on since it took part last with this
    fragment. A row counts wholly when it was credited for each of the fragments.
    """
    total, found = 0, []
    for each in rounds:
        total += sum(each["rows"].values())
        found.append((each["at"], total / fragments))
    return found


def value_at(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Return the last value of a curve that grows in steps, at or before a place; 0 before."""
    return next((y for x, y in reversed(curve) if x <= at), 0.0)


def interpolated(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value of a curve between its points; beyond them the nearest one's."""
    points = sorted(curve)
    if at <= points[0][0]:
        return points[0][1]
    for (a, y), (b, z) in itertools.pairwise(points):
        if a <= at <= b:
            return y if a == b else y + (z - y) * (at - a) / (b - a)
    return points[-1][1]


def closed_twice(rounds: Iterable[Event]) -> list[int]:
    """Return the numbers of rounds that were closed more than once."""
    count = collections.Counter(each["round"] for each in rounds)
    return sorted(number for number, times in count.items() if times > 1)


def not_told(rounds: Iterable[Event]) -> list[int]:
    """Return the numbers of rounds that no coordinator told of: it was killed before it could."""
    numbers = {each["round"] for each in rounds}
    return sorted(set(range(max(numbers, default=-1) + 1)) - numbers)


def differing(hashes: Iterable[Event]) -> list[dict[str, Any]]:
    """Return each fragment and version for which two islands logged different hashes."""
    seen: dict[tuple[int, int], dict[tuple[str, str], list[str]]] = {}
    for x in hashes:
        bits = seen.setdefault((x["fragment"], x["version"]), collections.defaultdict(list))
        bits[x["copy"], x["optimizer"]].append(f"{x['slot']}.{x['life']}")
    return [
        {"fragment": fragment, "version": version, "who": list(bits.values())}
        for (fragment, version), bits in sorted(seen.items())
        if len(bits) > 1
    ]


def shrinking(hashes: Iterable[Event]) -> list[dict[str, Any]]:
    """Return where a process went back to an older version of a fragment."""
    newest: dict[tuple[int, int, int], int] = {}
    found = []
    for x in hashes:
        key = x["slot"], x["life"], x["fragment"]
        if x["version"] < newest.get(key, 0):
            found.append({"slot": x["slot"], "life": x["life"], "version": x["version"]})
        newest[key] = x["version"]
    return found


def over_credited(
    rounds: Sequence[Event], steps: Mapping[int, int], rows: int, fragments: int
) -> dict[str, int]:
    """Return by "slot/fragment" how many rows more were credited than were trained on.

    Args:
      rounds: the closed rounds.
      steps: the steps that all processes of a slot have taken.
      rows: the rows of a step.
      fragments: the number of fragments.
    """
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for each in rounds:
        for slot, num in each["rows"].items():
            # An island that has trained on nothing takes part with a weight of 1.
            counts[int(slot), each["round"] % fragments] += num if num > 1 else 0
    more = {key: num - rows * steps.get(key[0], 0) for key, num in counts.items()}
    return {f"{slot}/{p}": num for (slot, p), num in sorted(more.items()) if num > 0}


def restarts(events: Iterable[Event], clock: str = "at") -> list[dict[str, float]]:
    """Return the seconds of each phase of the processes that came after a killed one, of those
    that came to their first step.

    Args:
      events: the lines that processes printed and the disturbances, each a dict with "what".
      clock: "at", or "cpu" for the seconds on a core of the process, without its start by Python.
    """
    order = ("spawned", "imported", "joined", "caught_up", "step")
    seen: dict[tuple[int, int], dict[str, float]] = collections.defaultdict(dict)
    for event in events:
        if event["what"] in order and event.get("life", 0) > 0:
            at = event.get(clock, 0.0)
            seen[event["slot"], event["life"]].setdefault(event["what"], at)
    found = []
    for times in seen.values():
        if len(times) == len(order):
            at = [times[name] for name in order]
            seconds = [b - a for a, b in itertools.pairwise(at)]
            found.append(dict(zip(order[1:], seconds, strict=True)) | {"all": at[-1] - at[0]})
    return found


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each column."""
    names = rows[0] if rows else ()
    return {name: statistics.median(row[name] for row in rows) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """A process of an island.

    Attributes:
      slot: the number of its island.
      spawned, first, ended: when it was started, took its first step, and ended, in seconds. The
        first step of one that took none is at its end.
    """

    slot: int
    spawned: float
    first: float
    ended: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A run and what was seen of it. All times are seconds from its beginning.

    Attributes:
      seconds: its length.
      events: the lines that processes printed and the disturbances, each a dict with "what".
      hashes: the lines of the islands' logs. The lines of one process are in order.
      losses: (time, tokens that count, validation loss) of the outer parameters, by time.
      rows, length: rows of a step, and their tokens.
      fragments: the number of fragments.
    """

    seconds: float
    events: Sequence[Event]
    hashes: Sequence[Event]
    losses: Sequence[tuple[float, float, float]]
    rows: int
    length: int
    fragments: int

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The closed rounds."""
        return closed_rounds(self.events)

    @property
    def tokens(self) -> list[tuple[float, float]]:
        """(time, tokens that count until then)."""
        rounds = credited(self.rounds, self.fragments)
        return [(0.0, 0.0), *((at, rows * self.length) for at, rows in rounds)]

    @property
    def counted(self) -> float:
        """The tokens that count at the end."""
        return value_at(self.tokens, self.seconds)

    @property
    def taken(self) -> float:
        """The tokens of all steps that were taken."""
        steps = [e for e in self.events if e["what"] == "step" and 0 <= e["at"] <= self.seconds]
        return len(steps) * self.rows * self.length

    @property
    def steps(self) -> dict[int, int]:
        """The steps of each slot, from the first process on."""
        return dict(collections.Counter(e["slot"] for e in self.events if e["what"] == "step"))

    def loss(self) -> tuple[float, float]:
        """Return the tokens that count and the loss of the last outer parameters of the run."""
        return next((n, x) for at, n, x in reversed(self.losses) if at <= self.seconds)


def lives(events: Iterable[Event], seconds: float) -> list[Life]:
    """Return the processes of islands in a run of so many seconds, by slot and time."""
    seen: dict[tuple[int, int], dict[str, float]] = collections.defaultdict(dict)
    for event in events:
        if event.get("life", -1) >= 0 and event["what"] in ("spawned", "step", "ended"):
            seen[event["slot"], event["life"]].setdefault(event["what"], event["at"])
    found = []
    for (slot, _), times in sorted(seen.items()):
        ended = min(times.get("ended", seconds), seconds)
        first = min(times.get("step", ended), ended)
        found.append(
            Life(slot=slot, spawned=min(times["spawned"], ended), first=first, ended=ended)
        )
    return found
