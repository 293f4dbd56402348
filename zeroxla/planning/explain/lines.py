"""`LineCost`: the time that a device computes for each line of the model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.lanes import COMPUTE, Event


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LineCost:
    """What one line of the model costs, in forward and backward together.

    Attributes:
      line: "folder/file.py:line"; for what zeroxla computes itself, the phase of the step.
      text: the equation of this line that costs most, shortened.
      scope: the scopes of that equation.
      seconds: for how long a device computes it in a step.
      share: that over the length of the step.
      bound: what limits it for most of this time: "compute" or "memory".
      count: the number of equations that run for it.
    """

    line: str
    text: str
    scope: str
    seconds: float
    share: float
    bound: str
    count: int


def lines_of(events: Iterable[Event], step_s: float) -> list[LineCost]:
    """Return the cost of each line, the most first.

    Args:
      events: the events of a step.
      step_s: the length of the step.
    """
    groups: dict[str, list[tuple[Origin, float]]] = {}
    for event in events:
        if event.lane == COMPUTE and event.end_s > event.start_s:
            origin = event.what if isinstance(event.what, Origin) else Origin(phase=event.phase)
            line = origin.line or f"({origin.phase})"
            groups.setdefault(line, []).append((origin, event.end_s - event.start_s))
    found = [_cost(line, mine, step_s) for line, mine in groups.items()]
    return sorted(found, key=lambda cost: -cost.seconds)


def _cost(line: str, mine: list[tuple[Origin, float]], step_s: float) -> LineCost:
    texts: Counter[tuple[str, str]] = Counter()
    bounds: Counter[str] = Counter()
    for origin, seconds in mine:
        texts[origin.text, origin.scope] += seconds  # pyright: ignore[reportArgumentType]
        bounds[origin.bound] += seconds  # pyright: ignore[reportArgumentType]
    (text, scope), _ = texts.most_common(1)[0]
    total = sum(seconds for _, seconds in mine)
    return LineCost(
        line=line,
        text=text,
        scope=scope,
        seconds=total,
        share=total / step_s if step_s else 0.0,
        bound=bounds.most_common(1)[0][0] or "memory",
        count=len(mine),
    )
