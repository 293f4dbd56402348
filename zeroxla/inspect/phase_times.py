"""`phase_times`: reads from a profile how long each phase of a training step took."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from zeroxla.inspect.profile_events import Operation, Places, operations, read_events
from zeroxla.program.phases import PHASES
from zeroxla.program.report import Report

if TYPE_CHECKING:
    from rich.table import Table

_NUM_SCOPES = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes(Report):
    """Where the time of a step went, on average over devices and steps.

    Operations that run at the same time on one device all count, so that phases can add up to more
    than the step. What waits in a collective for other devices counts as the collective.

    Attributes:
      phases: ms of each phase; see `zeroxla.inspect.PHASES`.
      scopes: ms of the model's scopes that take longest, by (phase, scope), the longest first.
      idle: ms in which a device did not run the program, between the first and the last operation
        of all steps. What else was done between steps, such as an evaluation, is in it.
      step: ms of a step.
      steps, devices: the number of steps and of devices that were measured.
    """

    phases: Mapping[str, float]
    scopes: Mapping[tuple[str, str], float]
    idle: float
    step: float
    steps: int
    devices: int

    def table(self) -> Table:
        """Return the figures as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=f"A step of {self.step:.2f} ms ({self.steps} steps, {self.devices} devices)",
            title_justify="left",
        )
        table.add_column("phase")
        table.add_column("where", overflow="fold")
        table.add_column("ms", justify="right")
        table.add_column("of a step", justify="right")

        def row(phase: str, where: str, ms: float) -> None:
            table.add_row(phase, Text(where), f"{ms:.2f}", f"{ms / self.step:.1%}")

        for phase, ms in self.phases.items():
            row(phase, "", ms)
        row("idle", "", self.idle)
        table.add_section()
        for (phase, scope), ms in self.scopes.items():
            row(phase, scope, ms)
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain types, for JSON."""
        return {
            "step_ms": self.step,
            "idle_ms": self.idle,
            "phases_ms": dict(self.phases),
            "scopes_ms": [
                {"phase": phase, "scope": scope, "ms": ms}
                for (phase, scope), ms in self.scopes.items()
            ],
            "steps": self.steps,
            "devices": self.devices,
        }


def phase_times(
    folder: str | os.PathLike[str], program: jax.stages.Compiled | str, *, steps: int
) -> PhaseTimes:
    """Read how long each phase of a training step took, from a profile.

    A profile names the compiler's operations; the program says which phase and which part of the
    model each of them belongs to.

    Args:
      folder: the folder that `jax.profiler.start_trace(folder, create_perfetto_trace=True)` was
        given, or that `zeroxla train --profile` wrote. The newest profile in it is read.
      program: the program that ran, such as `step.lower(state, batch).compile()`, or its HLO text.
      steps: how often it ran while the profile was taken.

    Raises:
      ValueError: the folder holds no such profile, the profile holds no operation of the program,
        or `steps` is less than 1.

    Cost: reads the profile, about 1 s per 100 000 events.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be 1 or more: how often the program ran")
    places = Places(program)
    events = operations(read_events(folder), places.module)
    devices = {event.device for event in events}
    per = 1e-3 / (steps * len(devices))  # of us on all devices: ms of a step on one
    phases: dict[str, float] = defaultdict(float)
    scopes: dict[tuple[str, str], float] = defaultdict(float)
    for event, own in _own_times(events):
        place = places.of(event.name)
        phases[place.phase] += own * per
        if place.scope:
            scopes[place.phase, place.scope] += own * per
    busy, whole = _busy_and_whole(events)
    longest = sorted(scopes, key=lambda key: -scopes[key])[:_NUM_SCOPES]
    return PhaseTimes(
        phases={name: phases[name] for name in sorted(phases, key=_place)},
        scopes={key: scopes[key] for key in longest},
        idle=max(0.0, whole - busy) * per,
        step=whole * per,
        steps=steps,
        devices=len(devices),
    )


def _own_times(events: Sequence[Operation]) -> Iterable[tuple[Operation, float]]:
    """Yield each event with its time without the events inside it: a loop has its turns inside."""
    by_lane: dict[Any, list[Operation]] = defaultdict(list)
    for event in events:
        by_lane[event.lane].append(event)
    for lane in by_lane.values():
        stack: list[tuple[Operation, list[float]]] = []
        for event in sorted(lane, key=lambda event: (event.start, -event.end)):
            while stack and stack[-1][0].end <= event.start:
                done, inside = stack.pop()
                yield done, done.end - done.start - sum(inside)
            if stack:
                stack[-1][1].append(min(event.end, stack[-1][0].end) - event.start)
            stack.append((event, []))
        for done, inside in stack:
            yield done, done.end - done.start - sum(inside)


def _busy_and_whole(events: Sequence[Operation]) -> tuple[float, float]:
    """Return the us in which devices ran something, and those from their first operation to their
    last, summed over devices."""
    busy = whole = 0.0
    for device in {event.device for event in events}:
        own = sorted((e.start, e.end) for e in events if e.device == device)
        end = own[0][0]
        for start, stop in own:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        whole += end - own[0][0]
    return busy, whole


def _place(phase: str) -> int:
    return PHASES.index(phase.partition("+")[0])
