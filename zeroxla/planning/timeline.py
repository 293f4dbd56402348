"""The time line of a traced step: computation, and each link, side by side.

Every equation that writes to memory takes the longer of its FLOPs and its bytes (a roofline); every
collective takes its link for its latency and its bytes. An equation starts when what it reads is
there and its lane is free, in the order of the program. Loops are followed for three turns; the
others take as long as the third.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from zeroxla import compat
from zeroxla.inspect.phases import phase_of
from zeroxla.inspect.traffic import received_bytes
from zeroxla.mesh import NODE, PIPE
from zeroxla.planning.liveness import FUSED, RENAMES, Scope, size_of
from zeroxla.planning.machines import Device, Link
from zeroxla.planning.wires import KINDS, axes_of, body_of
from zeroxla.planning.work import reads_of, work_of
from zeroxla.trace import Atom, Equation, Program, Value

COMPUTE = "compute"
TURNS = 3


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a step runs on.

    Attributes:
      device: each of its devices.
      links: of each mesh axis.
      mesh_shape: axis lengths.
    """

    device: Device
    links: Mapping[str, Link]
    mesh_shape: Mapping[str, int]

    def seconds(self, axis: str, kind: str, num_bytes: float) -> float:
        """Return what a collective over one axis takes."""
        size = self.mesh_shape[axis]
        link = self.links[axis]
        sharing = 1
        if link.of == "node" and axis in (NODE, PIPE):
            # The devices of a node send at the same time.
            sharing = math.prod(n for a, n in self.mesh_shape.items() if a not in (NODE, PIPE))
        rounds = 1 if kind == "collective-permute" else size - 1
        received = received_bytes(kind, int(num_bytes), size)
        return rounds * link.latency_s + received * sharing / link.bytes_per_s


class Clock:
    """Simulates one device."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: dict[str, float] = {}
        self._scopes: dict[int, tuple[Scope, dict[Value, frozenset[Value]]]] = {}
        self._bodies: dict[tuple[int, int | None], Program] = {}
        self.busy: dict[str, float] = {}
        self.events: list[Event] = []

    def run(self, program: Program, ready: Sequence[float], path: str = "") -> list[float]:
        """Run a program.

        Args:
          program: traced; shapes are one device's.
          ready: seconds at which each of its inputs is there.
          path: of the scopes around it.

        Returns:
          Seconds at which each result is there.
        """
        if id(program) not in self._scopes:
            scope = Scope.of(program, late=False)
            self._scopes[id(program)] = scope, reads_of(scope, FUSED)
        scope, reads = self._scopes[id(program)]
        there: dict[Value, float] = dict(zip(program.inputs, ready, strict=True))

        def when(atoms: Sequence[Atom]) -> float:
            return max((there.get(a, 0.0) for a in atoms if isinstance(a, Value)), default=0.0)

        for eq in program.equations:
            start = when(eq.inputs)
            here = "/".join(filter(None, (path, str(eq.name_stack), eq.name)))
            if eq.name in RENAMES:
                # A barrier with several operands waits for all of them.
                there.update(dict.fromkeys(eq.outputs, start))
            elif eq.name == "scan":
                there.update(zip(eq.outputs, self._loop(eq, [when([a]) for a in eq.inputs], here)))
            elif eq.name == "cond":
                there.update(dict.fromkeys(eq.outputs, self._branches(eq, start, here)))
            elif eq.name in KINDS:
                there.update(dict.fromkeys(eq.outputs, self._collective(eq, start, here)))
            elif eq.name in FUSED and not any(v in scope.in_memory for v in eq.outputs):
                there.update(dict.fromkeys(eq.outputs, start))
            else:
                work = work_of(eq, reads, scope)
                device = self._target.device
                seconds = max(
                    work.flops / device.rate(work.dtype), work.num_bytes / device.bytes_per_s
                )
                there.update(dict.fromkeys(eq.outputs, self._take(COMPUTE, start, seconds, here)))
        return [when([atom]) for atom in program.outputs]

    def update(self, seconds: float) -> None:
        """Take the device for the optimizer's update, after everything else."""
        self._take(COMPUTE, max(self._free.values(), default=0.0), seconds, "update/")

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
        body, length = self._body(eq, "jaxpr"), eq.params["length"]
        carry = list(ready[num_consts : num_consts + num_carry])
        fixed, xs = ready[:num_consts], ready[num_consts + num_carry :]
        outs: list[float] = []
        marks: list[tuple[float, dict[str, float], int]] = []
        for _ in range(min(length, TURNS)):
            outs = self.run(body, [*fixed, *carry, *xs], path)
            carry = outs[:num_carry]
            latest = max([*self._free.values(), *outs], default=0.0)
            marks.append((latest, dict(self.busy), len(self.events)))
        rest = length - TURNS
        if rest > 0:
            (before, busy, first), (after, now, _) = marks[-2:]
            step = after - before
            turn = self.events[first:]
            for lane, seconds in now.items():
                self.busy[lane] = seconds + rest * (seconds - busy.get(lane, 0.0))
            for k in range(1, rest + 1):
                shift = k * step
                self.events += [
                    Event(e.lane, e.phase, e.start_s + shift, e.end_s + shift) for e in turn
                ]
            self._free = {lane: free + rest * step for lane, free in self._free.items()}
            outs = [out + rest * step for out in outs]
        return outs

    def _branches(self, eq: Equation, start: float, path: str) -> float:
        """Run the branch that takes longest; return when it is done."""
        free, busy, events = self._free, self.busy, self.events
        longest: tuple[float, tuple] | None = None
        for i in range(len(eq.params["branches"])):
            self._free, self.busy, self.events = dict(free), dict(busy), list(events)
            body = self._body(eq, "branches", i)
            outs = self.run(body, [start] * len(body.inputs), path)
            end = max([*self._free.values(), *outs, start])
            if longest is None or end > longest[0]:
                longest = end, (self._free, self.busy, self.events)
        assert longest is not None
        self._free, self.busy, self.events = longest[1]
        return longest[0]

    def _body(self, eq: Equation, name: str, index: int | None = None) -> Program:
        """Return the program of a body, the same one each time."""
        key = id(eq), index
        if key not in self._bodies:
            jaxpr = eq.params[name] if index is None else eq.params[name][index]
            self._bodies[key] = body_of(jaxpr)
        return self._bodies[key]
