"""`LinkUse`: what takes a link in a step, how long it takes, and how long the step waits for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.explain.waits import MIDDLE, Wait
from zeroxla.planning.lanes import COMPUTE, Event
from zeroxla.planning.target import DISK, HOST, HOST_UPDATE

_OF_HOST = frozenset({HOST, HOST_UPDATE, DISK})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The collectives of one kind that bring one unit, in all layers that are alike; or moves of
    the host.

    Attributes:
      phase: one of `zeroxla.program.phases.PHASES`.
      kind: the HLO kind of a collective; empty for a move of the host.
      lane: the mesh axis whose link it takes, or one of the host's lanes.
      leaves: the leaves that travel; those of equal layers as one, such as "h_*/mlp/kernel".
      unit: the unit of these leaves, or several units, such as "1, 2, 3".
      scope: the scopes of the model, such as "h_*/attn".
      line: "folder/file.py:line" of the model; empty if it is not known.
      count: the number of collectives that run for it in a step.
      num_bytes: their bytes for one layer.
      seconds: for how long the link is taken in a step.
      waited_s: for how long nothing is computed because of it.
      hideable_s: the part of `waited_s` that is not at the ends of a step.
    """

    phase: str
    kind: str
    lane: str
    leaves: tuple[str, ...]
    unit: str
    scope: str
    line: str
    count: int
    num_bytes: int
    seconds: float
    waited_s: float
    hideable_s: float

    @property
    def is_gather(self) -> bool:
        """Whether it brings leaves."""
        return self.phase.endswith("gather")

    @property
    def name(self) -> str:
        """What it does, in words, such as "forward gather over node"."""
        if self.lane in _OF_HOST:
            return f"{self.phase}: {self.lane}"
        return f"{self.phase} over {self.lane}"

    @property
    def what(self) -> str:
        """What travels, in words."""
        if not self.leaves:
            return self.scope or self.kind or "arrays of the state"
        first, *others = self.leaves
        more = f" and {len(others)} more" if others else ""
        return f"{first}{more}{f' ({self.unit_in_words})' if self.unit else ''}"

    @property
    def unit_in_words(self) -> str:
        """The unit, such as "unit 3"; what is persistent is no unit."""
        return self.unit if self.unit.isalpha() else f"unit {self.unit}"


def link_uses_of(events: Iterable[Event], waits: Sequence[Wait]) -> list[LinkUse]:
    """Return what takes links in a step, those first that it waits for longest.

    Args:
      events: the events of all lanes.
      waits: the waits of the step.
    """
    groups: dict[tuple, list[Event]] = {}
    for event in events:
        if event.lane != COMPUTE:
            groups.setdefault(_alike(event), []).append(event)
    waited: dict[tuple, list[Wait]] = {}
    for wait in waits:
        if wait.event is not None:
            waited.setdefault(_alike(wait.event), []).append(wait)
    by_unit: dict[tuple[str, ...], list[LinkUse]] = {}
    for key, mine in groups.items():
        found = _use(mine, waited.get(key, ()))
        by_unit.setdefault((found.lane, found.phase, found.kind, found.unit), []).append(found)
    uses = map(_together, by_unit.values())
    return sorted(uses, key=lambda use: (-use.waited_s, -use.seconds))


def _alike(event: Event) -> tuple:
    """Return a key that is equal for events of equal layers."""
    origin = _origin(event)
    return (
        event.lane,
        origin.phase,
        origin.kind,
        origin.num_elements,
        origin.unit.isalpha(),
        _any(origin.scope),
        tuple(map(_any, origin.leaves)),
    )


def _use(events: Sequence[Event], waits: Sequence[Wait]) -> LinkUse:
    origins = [_origin(event) for event in events]
    first = origins[0]
    units = dict.fromkeys(x.unit for x in origins if x.unit)
    scopes = dict.fromkeys(x.scope for x in origins)
    leaves = first.leaves
    if any(x.leaves != leaves for x in origins):
        leaves = tuple(dict.fromkeys(map(_any, leaves)))
    return LinkUse(
        phase=first.phase,
        kind=first.kind,
        lane=events[0].lane,
        leaves=leaves,
        unit=_in_a_row(list(units)),
        scope=first.scope if len(scopes) == 1 else _any(first.scope),
        line=next((x.line for x in origins if x.line), ""),
        count=len(events),
        num_bytes=first.num_bytes,
        seconds=sum(event.end_s - event.start_s for event in events),
        waited_s=sum(wait.seconds for wait in waits),
        hideable_s=sum(wait.seconds for wait in waits if wait.place == MIDDLE),
    )


def _together(alike: Sequence[LinkUse]) -> LinkUse:
    """Return what travels with one unit as one; the longest wait says where that is."""
    ordered = sorted(alike, key=lambda use: (-use.waited_s, -use.seconds))
    return dataclasses.replace(
        ordered[0],
        leaves=tuple(dict.fromkeys(name for use in ordered for name in use.leaves)),
        count=sum(use.count for use in alike),
        num_bytes=sum(use.num_bytes for use in alike),
        seconds=sum(use.seconds for use in alike),
        waited_s=sum(use.waited_s for use in alike),
        hideable_s=sum(use.hideable_s for use in alike),
    )


def _origin(event: Event) -> Origin:
    return event.what if isinstance(event.what, Origin) else Origin(phase=event.phase)


def _any(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _in_a_row(units: Sequence[str]) -> str:
    """Return names of units in words: numbers that follow one another as "1-4"."""
    if len(units) < 3 or not all(unit.isdigit() for unit in units):
        return ", ".join(units)
    numbers = sorted(map(int, units))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
