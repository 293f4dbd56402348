"""What processes of islands and the coordinator tell each other: a `MemberReport` and a `View`.

Both say all that counts at the time, so one that is lost costs nothing: the next one says it again.
They travel as JSON, and nothing is taken that has another form.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from zeroxla.step.islands.membership.frames import FrameError
from zeroxla.step.islands.membership.post import Address

MAX_BYTES = 1 << 20
"""The most bytes of a message."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far the data of a slot has been trained on.

    Attributes:
      batches: the number of batches.
      rows: the number of their rows.
    """

    batches: int = 0
    rows: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """What a process of an island tells the coordinator.

    Attributes:
      slot: the number of its island; None before it has one.
      process: its number among the processes of the island.
      num_processes: their number.
      port: where it listens for other islands.
      host: the address at which they reach it. None takes the one that the coordinator sees.
      facts: what all islands have in common, by name; empty before it has begun.
      trains: whether it takes steps; before, it fetches the outer parameters.
      round: the number of the next round that it will be ready for.
      versions: for each fragment, the version of its outer parameters: the number after that of the
        last round in them, 0 before the first.
      position: how far it has trained on the data of its slot.
      ready: the rounds that it waits for, with the rows since the fragment's last exchange.
      held: of these rounds, the attempt of which it holds the result, and the digest of it.
      failed: of these rounds, the attempt that failed, in which of its two moves, and the slots
        that are to blame.
      checksums: for each fragment, the version and the sum of the outer parameters' bits.
    """

    slot: int | None
    process: int
    num_processes: int
    port: int
    host: str | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    trains: bool = False
    round: int = 0
    versions: tuple[int, ...] = ()
    position: Position = Position()
    ready: Mapping[int, int] = dataclasses.field(default_factory=dict)
    held: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    failed: Mapping[int, tuple[str, int, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    checksums: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the message."""
        return _written(self)

    @staticmethod
    def of(data: bytes) -> MemberReport:
        """Return what a message says.

        Raises:
          FrameError: it has another form.
        """

        def make(x: Any) -> MemberReport:
            return MemberReport(
                slot=None if x["slot"] is None else _number(x["slot"]),
                process=_number(x["process"]),
                num_processes=_number(x["num_processes"]),
                port=_number(x["port"]),
                host=None if x["host"] is None else _text(x["host"]),
                facts={_text(k): _text(v) for k, v in x["facts"].items()},
                trains=bool(x["trains"]),
                round=_number(x["round"]),
                versions=tuple(map(_number, x["versions"])),
                position=_position(x["position"]),
                ready={int(k): _number(v) for k, v in x["ready"].items()},
                held={int(k): (_text(a), _text(d)) for k, (a, d) in x["held"].items()},
                failed={
                    int(k): (_text(a), _number(move), tuple(map(_number, slots)))
                    for k, (a, move, slots) in x["failed"].items()
                },
                checksums={
                    int(k): (_number(v), _number(s)) for k, (v, s) in x["checksums"].items()
                },
            )

        return _read(data, make)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """An island that takes part.

    Attributes:
      slot: its number.
      rows: its weight.
      addresses: where each of its processes listens.
      versions: see `MemberReport`.
    """

    slot: int
    rows: int
    addresses: tuple[Address, ...]
    versions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The last round of a fragment that was closed.

    Attributes:
      round: its number.
      attempt: the attempt that all who took part hold.
      digests: the digest of the result, by process of an island.
    """

    round: int
    attempt: str
    digests: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What the coordinator tells a process.

    Attributes:
      slot: the number of the island.
      refused: why it may not take part; "" if it may.
      knows: whether the coordinator has what all islands have in common from this process.
      started: whether the run has begun.
      deadline: seconds that a round waits for an island.
      round: the number of the open round.
      versions: for each fragment, the newest version; see `MemberReport`.
      closes_in: seconds until the round goes on without who is not ready; None if nobody is.
      attempt: the name of the exchange under way; "" if there is none.
      roster: who takes part in it.
      closed: the last round of each fragment.
      living: the islands that train.
      astray: fragments of which this island has other outer parameters than the others.
      position: how far the data of the slot has been trained on.
      counted: for each fragment, the version of the last round in which this island counted.
    """

    slot: int
    refused: str = ""
    knows: bool = False
    started: bool = False
    deadline: float = 60.0
    round: int = 0
    versions: tuple[int, ...] = ()
    closes_in: float | None = None
    attempt: str = ""
    roster: tuple[Place, ...] = ()
    closed: Mapping[int, Closed] = dataclasses.field(default_factory=dict)
    living: tuple[Place, ...] = ()
    astray: tuple[int, ...] = ()
    position: Position = Position()
    counted: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the message."""
        return _written(self)

    @staticmethod
    def of(data: bytes) -> View:
        """Return what a message says.

        Raises:
          FrameError: it has another form.
        """

        def make(x: Any) -> View:
            closes_in = x["closes_in"]
            return View(
                slot=_number(x["slot"]),
                refused=_text(x["refused"]),
                knows=bool(x["knows"]),
                started=bool(x["started"]),
                deadline=float(x["deadline"]),
                round=_number(x["round"]),
                versions=tuple(map(_number, x["versions"])),
                closes_in=None if closes_in is None else float(closes_in),
                attempt=_text(x["attempt"]),
                roster=tuple(map(_place, x["roster"])),
                closed={int(k): closed_of(v) for k, v in x["closed"].items()},
                living=tuple(map(_place, x["living"])),
                astray=tuple(map(_number, x["astray"])),
                position=_position(x["position"]),
                counted=tuple(map(_number, x["counted"])),
            )

        return _read(data, make)


def closed_of(x: Any) -> Closed:
    """Return a closed round from its JSON."""
    digests = tuple(map(_text, x["digests"]))
    return Closed(round=_number(x["round"]), attempt=_text(x["attempt"]), digests=digests)


def _written(message: Any) -> bytes:
    return json.dumps(dataclasses.asdict(message)).encode()


def _read(data: bytes, make: Any) -> Any:
    try:
        return make(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"a message has another form: {error}") from error


def _number(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or x < 0:
        raise ValueError(f"{x!r} is no number")
    return x


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"{x!r} is no text")
    return x


def _position(x: Any) -> Position:
    return Position(batches=_number(x["batches"]), rows=_number(x["rows"]))


def _place(x: Any) -> Place:
    addresses = (
        Address(host=_text(a["host"]), port=_number(a["port"]), member=_number(a["member"]))
        for a in x["addresses"]
    )
    versions = tuple(map(_number, x["versions"]))
    slot, rows = _number(x["slot"]), _number(x["rows"])
    return Place(slot=slot, rows=rows, addresses=tuple(addresses), versions=versions)
