"""The time line of a traced step: computation, and each link, side by side.

Every equation that writes to memory takes the longer of its FLOPs and its bytes (a roofline); every
collective takes its link for its latency and its bytes. An equation starts when what it reads is
there and its lane is free; of several, the one that was ready first. Loops are followed for three
turns; the others take as long as the third, or as the lane that is taken longest in it. On GPUs the
compiler gathers in a loop's turn what the next one needs (see `compat.compiler_options`): there
what depends on nothing that the loop carries is not held back by barriers, which tie a gather to
its turn. A pipeline's tick is taken to have a forward and a backward, and there are as many such
ticks as its schedule has work for.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zeroxla.inspect.phases import phase_of
from zeroxla.pipeline.ticks import TICKS
from zeroxla.planning.liveness import FUSED, RENAMES, Scope, is_on_host, size_of
from zeroxla.planning.target import DISK, HOST, Target
from zeroxla.planning.wire_bytes import KINDS, axes_of, body_of
from zeroxla.planning.work import reads_of, work_of
from zeroxla.program import compat
from zeroxla.program.trace import Atom, Equation, Program, Value

COMPUTE = "compute"
TURNS = 3
READS_DISK = "pure_callback"
"""The equation that reads a parameter on disk; see `Desk.redeem`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that takes a lane.

    Attributes:
      lane: `COMPUTE`, or the mesh axis whose link it takes.
      phase: one of `zeroxla.inspect.phases.PHASES`.
      start_s, end_s: seconds from the begin of the step.
    """

    lane: str
    phase: str
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeLine:
    """One step on one device.

    Attributes:
      seconds: from its begin to its end.
      busy_s: of each lane, the seconds for which it is taken.
      events: in the order in which they were begun.
    """

    seconds: float
    busy_s: Mapping[str, float]
    events: tuple[Event, ...]


class Clock:
    """Simulates one device.

    Args:
      target: the device and its links.
      ahead: loops gather a turn ahead.
      full_ticks: of a pipeline: how many ticks with a forward and a backward take as long as its
        schedule, in which some have only one of them.
    """

    def __init__(
        self, target: Target, *, ahead: bool = False, full_ticks: float | None = None
    ) -> None:
        self._target, self._ahead, self._full_ticks = target, ahead, full_ticks
        self._free: dict[str, float] = {}
        self._scopes: dict[int, tuple[Scope, dict[Value, frozenset[Value]]]] = {}
        self._bodies: dict[tuple[int, int], Program] = {}
        self.busy: dict[str, float] = {}
        self.events: list[Event] = []

    def run(
        self,
        program: Program,
        ready: Sequence[float],
        path: str = "",
        early: Iterable[Value] = (),
    ) -> list[float]:
        """Run a program.

        Args:
          program: traced; shapes are one device's.
          ready: seconds at which each of its inputs is there.
          path: of the scopes around it.
          early: inputs such that what depends on them alone may run in an earlier turn.

        Returns:
          Seconds at which each result is there.
        """
        if id(program) not in self._scopes:
            scope = Scope.of(program, self._target.device.platform, late=False)
            self._scopes[id(program)] = scope, reads_of(scope, FUSED)
        scope, reads = self._scopes[id(program)]
        there: dict[Value, float] = dict(zip(program.inputs, ready, strict=True))
        early = set(early)

        def when(atoms: Sequence[Atom]) -> float:
            return max((there.get(a, 0.0) for a in atoms if isinstance(a, Value)), default=0.0)

        for eq in _as_they_get_ready(program, there):
            start = when(eq.inputs)
            here = "/".join(filter(None, (path, str(eq.name_stack), eq.name)))
            is_early = bool(early) and early.issuperset(eq.values)
            if is_early:
                early.update(eq.outputs)
            ends: Iterable[float] = ()
            if eq.name in RENAMES:
                # A barrier with several operands waits for all of them.
                waits = [a not in early for a in eq.inputs]
                early.update(o for o, wait in zip(eq.outputs, waits, strict=False) if not wait)
                ends = (start if wait else when([a]) for wait, a in zip(waits, eq.inputs))
            elif eq.name in ("scan", "cond") and is_early:
                ends = [self._before(eq, start, here)] * len(eq.outputs)
            elif eq.name == "scan":
                ends = self._loop(eq, [when([a]) for a in eq.inputs], here)
            elif eq.name == "cond":
                ends = [self._branches(eq, start, here)] * len(eq.outputs)
            elif is_move(eq):
                seconds = self._target.host_s(sum(map(size_of, eq.outputs)))
                ends = [self._take(HOST, start, seconds, here)] * len(eq.outputs)
            elif eq.name == READS_DISK:
                size = sum(map(size_of, eq.outputs))
                end = self._take(DISK, start, self._target.disk_s(size), here)
                ends = [self._take(HOST, end, self._target.host_s(size), here)] * len(eq.outputs)
            elif eq.name in KINDS:
                ends = [self._collective(eq, start, here)] * len(eq.outputs)
            elif eq.name in FUSED and not any(v in scope.in_memory for v in eq.outputs):
                ends = [start] * len(eq.outputs)
            else:
                seconds = self._target.compute_s(work_of(eq, reads, scope))
                end = self._take(COMPUTE, start, seconds, here)
                ends = [start + seconds if is_early else end] * len(eq.outputs)
            there.update(zip(eq.outputs, ends, strict=False))
        return [when([atom]) for atom in program.outputs]

    def update(self, seconds: Mapping[str, float]) -> None:
        """Take lanes for the optimizer's update, after everything else and side by side: the
        device, and for what is offloaded the way to the host, the host, and the way to its disk."""
        start = max(self._free.values(), default=0.0)
        for lane, taken_s in seconds.items():
            self._take(lane, start, taken_s, "update/")

    def timeline(self) -> TimeLine:
        """Return what has been run."""
        end = max(self._free.values(), default=0.0)
        return TimeLine(seconds=end, busy_s=dict(self.busy), events=tuple(self.events))

    def _take(self, lane: str, start: float, seconds: float, path: str, kind: str = "") -> float:
        """Take a lane as soon as it is free; return when it is done."""
        taken = lane if self._target.device.overlaps else COMPUTE
        start = max(start, self._free.get(taken, 0.0))
        end = start + seconds
        self._free[taken] = end
        self.busy[lane] = self.busy.get(lane, 0.0) + seconds
        if seconds:
            self.events.append(Event(lane, phase_of(path, kind), start, end))
        return end

    def _collective(self, eq: Equation, start: float, path: str) -> float:
        kind = KINDS[eq.name]
        arrays = eq.outputs if kind == "all-gather" else eq.values
        num_bytes = sum(map(size_of, arrays))
        for axis in axes_of(eq):
            if self._target.mesh_shape.get(axis, 1) > 1:
                seconds = self._target.seconds(axis, kind, num_bytes)
                start = self._take(axis, start, seconds, path, kind)
        return start

    def _loop(self, eq: Equation, ready: Sequence[float], path: str) -> list[float]:
        num_consts, num_carry = compat.scan_counts(eq.params)
        body, length = self._body(eq, 0, eq.params["jaxpr"]), float(eq.params["length"])
        if self._full_ticks is not None and path.endswith(f"{TICKS}/scan"):
            length = min(self._full_ticks, length)
        carry = list(ready[num_consts : num_consts + num_carry])
        fixed, xs = ready[:num_consts], ready[num_consts + num_carry :]
        early = early_inputs(body, num_consts, num_carry) if self._ahead else set()
        outs: list[float] = []
        marks: list[tuple[float, dict[str, float], int]] = []
        for _ in range(min(round(length), TURNS)):
            outs = self.run(body, [*fixed, *carry, *xs], path, early)
            carry = outs[:num_carry]
            latest = max([*self._free.values(), *outs], default=0.0)
            marks.append((latest, dict(self.busy), len(self.events)))
        rest = length - TURNS
        if rest > 0:
            (before, busy, first), (after, now, _) = marks[-2:]
            step = max([after - before, *(now[lane] - busy.get(lane, 0.0) for lane in now)])
            turn = self.events[first:]
            for lane, seconds in now.items():
                self.busy[lane] = seconds + rest * (seconds - busy.get(lane, 0.0))
            for k in range(1, round(rest) + 1):
                self.events += [_shifted(event, k * step) for event in turn]
            self._free = {lane: free + rest * step for lane, free in self._free.items()}
            outs = [out + rest * step for out in outs]
        return outs

    def _branches(self, eq: Equation, start: float, path: str) -> float:
        """Run the branch that takes longest; return when it is done."""
        free, busy, events = self._free, self.busy, self.events
        longest: tuple[float, tuple] | None = None
        branches = compat.branches_for(eq.params, self._target.device.platform)
        for i, branch in enumerate(branches):
            self._free, self.busy, self.events = dict(free), dict(busy), list(events)
            body = self._body(eq, i, branch)
            outs = self.run(body, [start] * len(body.inputs), path)
            end = max([*self._free.values(), *outs, start])
            if longest is None or end > longest[0]:
                longest = end, (self._free, self.busy, self.events)
        assert longest is not None
        self._free, self.busy, self.events = longest[1]
        return longest[0]

    def _before(self, eq: Equation, start: float, path: str) -> float:
        """Run a loop or conditional that need not wait for its place; return when it is done."""
        free, self._free = self._free, {}
        first = len(self.events)
        if eq.name == "scan":
            ends = self._loop(eq, [0.0] * len(eq.inputs), path)
        else:
            ends = [self._branches(eq, 0.0, path)]
        seconds = max([*self._free.values(), *ends], default=0.0)
        moved = [_shifted(event, start) for event in self.events[first:]]
        self.events[first:] = moved
        self._free = {**free, COMPUTE: free.get(COMPUTE, 0.0) + seconds}
        return start + seconds

    def _body(self, eq: Equation, index: int, jaxpr: Any) -> Program:
        """Return the program of a body, the same one each time."""
        key = id(eq), index
        if key not in self._bodies:
            self._bodies[key] = body_of(jaxpr)
        return self._bodies[key]


def _shifted(event: Event, seconds: float) -> Event:
    return Event(event.lane, event.phase, event.start_s + seconds, event.end_s + seconds)


def _as_they_get_ready(program: Program, there: Mapping[Value, float]) -> Iterator[Equation]:
    """Yield the equations in the order in which what they read is there, then in that of the
    program; `there` is filled in between."""
    waiting: dict[int, int] = {}
    readers: dict[Value, list[int]] = {}
    ready: list[tuple[float, int]] = []

    def add(i: int) -> None:
        values = program.equations[i].values
        heapq.heappush(ready, (max((there[v] for v in values), default=0.0), i))

    for i, eq in enumerate(program.equations):
        missing = {v for v in eq.values if v not in there}
        waiting[i] = len(missing)
        for value in missing:
            readers.setdefault(value, []).append(i)
        if not missing:
            add(i)
    while ready:
        _, i = heapq.heappop(ready)
        eq = program.equations[i]
        yield eq
        for value in eq.outputs:
            for reader in readers.get(value, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    add(reader)


def is_move(eq: Equation) -> bool:
    """Return whether an equation moves arrays between the host's memory and the device's."""
    there = sum(map(is_on_host, eq.outputs)), sum(map(is_on_host, eq.values))
    return eq.name == "device_put" and there[0] != there[1]


def early_inputs(body: Program, num_consts: int, num_carry: int) -> set[Value]:
    """Return the inputs of a loop's body that are known a turn before: what is not carried, and
    carried counters, which follow from nothing but themselves."""
    consts = body.inputs[:num_consts]
    carried = body.inputs[num_consts : num_consts + num_carry]
    counters = {v for v in carried if v.aval.ndim == 0 and not v.is_float}
    known: set[Value] = {*consts, *counters}
    for eq in body.equations:
        if known.issuperset(eq.values):
            known.update(eq.outputs)
    follows = {v for v, out in zip(carried, body.outputs, strict=False) if out in known}
    return set(body.inputs).difference(carried) | (counters & follows)
