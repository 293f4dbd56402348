"""The time line of a traced step: computation, and each link, side by side.

An equation that writes to memory takes as long as its FLOPs or as its bytes, whichever takes longer
(a roofline). A collective takes its link for its latency and its bytes. An equation starts when its
operands are there and its lane is free; if several wait, the one that was ready first. A loop is
followed for three turns. Each further turn takes as long as the third, or as the lane that is taken
longest in it.

On GPUs the compiler gathers in a loop's turn the leaves that the next turn needs (see
`compat.compiler_options`). There, barriers, which tie a gather to its turn, do not hold back values
that depend on nothing that the loop carries. Attention that would be one kernel of cuDNN there
takes as long as its FLOPs. A pipeline's tick counts as a full one, in which each
conditional takes its longest branch, and there are as many as take as long as its schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from zeroxla.pipeline.ticks import TICKS
from zeroxla.planning.early_inputs import early_inputs
from zeroxla.planning.lanes import COMPUTE, Lanes, Mark, TimeLine
from zeroxla.planning.ready_order import arrival, in_ready_order
from zeroxla.planning.target import DISK, HOST, Target
from zeroxla.planning.wire_bytes import axes_of
from zeroxla.planning.work import Reads, Work, reads_of, work_of
from zeroxla.program import compat
from zeroxla.program.host_values import is_move
from zeroxla.program.live.liveness import Scope, size_of
from zeroxla.program.phases import phase_of
from zeroxla.program.primitives import FUSED, HLO_KINDS, RENAMES
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Program, Value
from zeroxla.program.walk import body_of, scope_path

TURNS = 3
"""The turns of a loop that are followed one by one."""

CUDNN_SCOPE = "cudnn_attention"
"""The scope of attention that is one kernel on a GPU; `zeroxla.models.attention` has it too."""

READS_DISK = "pure_callback"
"""The equation that reads a parameter on disk; see `Desk.redeem`."""


class EventNames(Protocol):
    """Says what the events of one program are of; see `Event.what`."""

    def of(self, eq: Equation, path: str, work: Work | None) -> Any:
        """Return the name of what an equation at `path` does; `work` is what the device computes
        for it, None if it takes a link."""
        ...

    def inside(self, eq: Equation, body: Program, path: str) -> EventNames:
        """Return the names for the program of a loop or a branch, whose equation is at `path`."""
        ...


class Clock:
    """Simulates one device.

    Args:
      target: the device and its links.
      ahead: loops gather a turn ahead.
      full_ticks: for a pipeline, the number of full ticks that take as long as its schedule, most
        of whose ticks are not full.
      names: names the events; None leaves them without.
      as_issued: follow the compiler more closely in a loop whose gathers run a turn ahead. Only
        gathers, and what is fused into others, then run ahead; a gather may take a link before a
        reduce that was simulated before it; and what a reduce has brought holds nothing up. Plans
        do without: the comparisons in docs/plan.md were made so.
    """

    def __init__(
        self,
        target: Target,
        *,
        ahead: bool = False,
        full_ticks: float | None = None,
        names: EventNames | None = None,
        as_issued: bool = False,
    ) -> None:
        self._target, self._ahead, self._full_ticks = target, ahead, full_ticks
        self._names, self._as_issued = names, as_issued
        self._lanes = Lanes(
            overlaps=target.device.overlaps, shared=target.shared_links, fills=as_issued
        )
        self._turn_before_s = 0.0
        self._scopes: dict[int, tuple[Scope, Reads]] = {}
        self._bodies: dict[tuple[int, int], Program] = {}

    def run(
        self,
        program: Program,
        ready: Sequence[float],
        path: str = "",
        early: Iterable[Value] = (),
    ) -> list[float]:
        """Run a program.

        Args:
          program: a traced program, whose shapes are one device's.
          ready: the second at which each of its inputs is there.
          path: path of the scopes around it.
          early: inputs that are known a turn before. An equation that reads only such values, or
            results of such equations, may run in an earlier turn.

        Returns:
          The second at which each result is there.
        """
        there: dict[Value, float] = dict(zip(program.inputs, ready, strict=True))
        early = set(early)
        for eq in in_ready_order(program, there):
            is_early = bool(early) and early.issuperset(eq.values) and self._may_run_ahead(eq, path)
            if is_early:
                early.update(eq.outputs)
            arrivals = [arrival(operand, there) for operand in eq.inputs]
            if eq.name in RENAMES:
                # A barrier with several operands waits for all of them, early ones aside.
                waits = [operand not in early for operand in eq.inputs]
                early.update(o for o, wait in zip(eq.outputs, waits, strict=False) if not wait)
                last = max(arrivals, default=0.0)
                ends = [last if wait else s for wait, s in zip(waits, arrivals, strict=True)]
            elif eq.name == "scan" and not is_early:
                ends = self._loop(eq, arrivals, scope_path(eq, path))
            else:
                start = max(arrivals, default=0.0)
                start = max(start, self._turn_before_s) if is_early else start
                end = self._end(program, eq, start, scope_path(eq, path), is_early=is_early)
                ends = [end] * len(eq.outputs)
            there.update(zip(eq.outputs, ends, strict=False))
        return [arrival(operand, there) for operand in program.outputs]

    def update(self, seconds: Mapping[str, float]) -> None:
        """Take lanes for the optimizer's update, after everything else and side by side.

        Args:
          seconds: for how long each lane is taken: the device's, which waits for its memory, and
            for an offloaded state the link to the host, the host, and its disk.
        """
        start = self._lanes.free_s()
        for lane, taken_s in seconds.items():
            self._lanes.take(lane, start, taken_s, "update/")
        self._lanes.wait_for_memory(seconds.get(COMPUTE, 0.0))

    def timeline(self) -> TimeLine:
        """Return the time line of all that has been run."""
        return self._lanes.timeline()

    def _end(
        self, program: Program, eq: Equation, start: float, path: str, *, is_early: bool
    ) -> float:
        """Run an equation all of whose results are there at the same time; return when."""
        target, take = self._target, self._lanes.take
        if eq.name in ("scan", "cond") and is_early:
            return self._lanes.run_early(start, lambda: self._from_zero(eq, path))
        if eq.name == "cond":
            return self._branches(eq, start, path)
        size = sum(map(size_of, eq.outputs))
        if is_move(eq):
            return take(HOST, start, target.host_s(size), path, what=self._what(eq, path))
        if eq.name == READS_DISK:
            what = self._what(eq, path)
            read = take(DISK, start, target.disk_s(size), path, what=what)
            return take(HOST, read, target.host_s(size), path, what=what)
        if eq.name in HLO_KINDS:
            return self._collective(eq, start, path)
        scope, reads = self._scope(program)
        if eq.name in FUSED and not any(v in scope.in_memory for v in eq.outputs):
            return start
        work = work_of(eq, reads, scope)
        if target.device.has_attention and CUDNN_SCOPE in path:
            work = dataclasses.replace(work, num_bytes=0.0)  # one kernel, which keeps scores inside
        seconds = target.compute_s(work)
        # What a reduce has brought is put away later, beside what the device is at.
        waits = self._as_issued and phase_of(path, "") == "reduce"
        if waits and start > self._lanes.free_at(COMPUTE):
            return self._lanes.put_off(COMPUTE, start, seconds, path, self._what(eq, path, work))
        end = take(COMPUTE, start, seconds, path, what=self._what(eq, path, work))
        if target.memory_s(work.num_bytes) > target.products_s(work):
            self._lanes.wait_for_memory(seconds)
        return start + seconds if is_early else end

    def _collective(self, eq: Equation, start: float, path: str) -> float:
        kind = HLO_KINDS[eq.name]
        arrays = eq.outputs if kind == "all-gather" else eq.values
        num_bytes = sum(map(size_of, arrays))
        for axis in axes_of(eq):
            if self._target.mesh_shape.get(axis, 1) > 1:
                seconds = self._target.seconds(axis, kind, num_bytes)
                what = self._what(eq, path)
                start = self._lanes.take(axis, start, seconds, path, kind, what)
        return start

    def _may_run_ahead(self, eq: Equation, path: str) -> bool:
        """Return whether the compiler may run an equation a turn ahead, if its operands are
        known."""
        is_small = eq.name in FUSED or eq.name in RENAMES
        if not self._as_issued or is_small:
            return True
        return phase_of(scope_path(eq, path), "").endswith("gather")

    def _what(self, eq: Equation, path: str, work: Work | None = None) -> Any:
        return None if self._names is None else self._names.of(eq, path, work)

    @contextlib.contextmanager
    def _inside(self, eq: Equation, body: Program, path: str) -> Iterator[None]:
        """Name the events of a loop's or a branch's body meanwhile."""
        names = self._names
        self._names = names and names.inside(eq, body, path)
        yield
        self._names = names

    def _loop(self, eq: Equation, ready: Sequence[float], path: str) -> list[float]:
        """Run a loop; return the second at which each result is there."""
        scan = Scan(eq)
        body, length = self._body(eq, 0, scan.jaxpr), float(scan.length)
        if self._full_ticks is not None and path.endswith(f"{TICKS}/scan"):
            length = min(self._full_ticks, length)
        consts, carry, xs = scan.split_inputs(ready)
        early = early_inputs(scan, body) if self._ahead else set()
        ends: list[float] = []
        marks: list[Mark] = []
        began_s = outside_s = self._turn_before_s
        for _ in range(min(round(length), TURNS)):
            self._turn_before_s = began_s
            began_s = self._lanes.free_at(COMPUTE) if self._as_issued else 0.0
            with self._inside(eq, body, path):
                ends = self.run(body, [*consts, *carry, *xs], path, early)
            carry = scan.split_outputs(ends)[0]
            marks.append(self._lanes.mark(ends))
        self._turn_before_s = outside_s
        if length > TURNS:
            added_s = self._lanes.repeat(marks[-2], marks[-1], length - TURNS)
            ends = [end + added_s for end in ends]
        return ends

    def _branches(self, eq: Equation, start: float, path: str) -> float:
        """Run the branch that takes longest; return when it is done."""
        before = self._lanes.copy()
        longest: tuple[float, Lanes] | None = None
        branches = compat.branches_for(eq.params, self._target.device.platform)
        for i, branch in enumerate(branches):
            self._lanes.become(before)
            body = self._body(eq, i, branch)
            with self._inside(eq, body, path):
                ends = self.run(body, [start] * len(body.inputs), path)
            end = max([self._lanes.free_s(), *ends, start])
            if longest is None or end > longest[0]:
                longest = end, self._lanes.copy()
        assert longest is not None
        self._lanes.become(longest[1])
        return longest[0]

    def _from_zero(self, eq: Equation, path: str) -> list[float]:
        """Run a loop or conditional whose operands are there from the beginning."""
        before, self._turn_before_s = self._turn_before_s, 0.0
        if eq.name == "scan":
            ends = self._loop(eq, [0.0] * len(eq.inputs), path)
        else:
            ends = [self._branches(eq, 0.0, path)]
        self._turn_before_s = before
        return ends

    def _scope(self, program: Program) -> tuple[Scope, Reads]:
        """Return a program's values, and its fused values' reads; the same objects each time."""
        if id(program) not in self._scopes:
            scope = Scope.of(program, self._target.device.platform, late=False)
            self._scopes[id(program)] = scope, reads_of(scope)
        return self._scopes[id(program)]

    def _body(self, eq: Equation, index: int, jaxpr: Any) -> Program:
        """Return the program of a body, the same one each time."""
        key = id(eq), index
        if key not in self._bodies:
            self._bodies[key] = body_of(jaxpr)
        return self._bodies[key]
