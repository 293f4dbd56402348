"""`HloClock`: the time line of a compiled program, on the devices and links of a target.

A program that is scheduled for a GPU runs in the order in which it is printed. A collective takes
its link from its start on, and computation waits for it at its done; one without a start holds
computation up. So the time line shows what the compiler has hidden, and what it has not.

Of other programs the order means nothing. There an instruction begins when its operands are there
and its lane is free, as if the compiler could hide all that the data allow.

Instructions take as long as their FLOPs or their bytes, whichever is longer (a roofline). A loop is
followed for three turns, and its branches' longest counts. Starting a kernel counts as nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from zeroxla.inspect.comms import axes_of
from zeroxla.planning.explain.origins import Origin
from zeroxla.planning.lanes import COMPUTE, Lanes, TimeLine
from zeroxla.planning.target import HOST, Target
from zeroxla.planning.work import Work
from zeroxla.program import hlo
from zeroxla.program.hlo.cost import cost_of
from zeroxla.program.hlo.trip_counts import trip_count
from zeroxla.program.phases import phase_of

TURNS = 3
"""The turns of a loop that are followed one by one."""
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_CALLS = frozenset({"call", "async-start"})
_ON_HOST = "S(5)"

OriginOf = Callable[[hlo.Collective, str, str], Origin]
"""(collective, phase, lane) -> what it brings."""


class HloClock:
    """Simulates a device that runs a compiled program.

    Args:
      module: the program.
      target: the device and its links; its mesh is the one that the program was built for.
      origin_of: names what a collective brings.
      wanted: whether an instruction of this path counts. Others take no time.
      while_trips: the trips to assume for loops whose trip count depends on data.
    """

    def __init__(
        self,
        module: hlo.Module,
        target: Target,
        origin_of: OriginOf,
        *,
        wanted: Callable[[str], bool] = lambda path: True,
        while_trips: int = 1,
    ) -> None:
        self._module, self._target, self._origin_of = module, target, origin_of
        self._wanted, self._while_trips = wanted, while_trips
        self._lanes = Lanes(overlaps=target.device.overlaps, shared=target.shared_links)
        found = hlo.collectives(module, while_trips=while_trips)
        self._collectives = {collective.name: collective for collective in found}
        self._origins: dict[str, tuple[str, float, Origin]] = {}

    def run(self, *, scheduled: bool) -> TimeLine:
        """Run the program.

        Args:
          scheduled: whether the order of its instructions is a schedule.
        """
        run = self._in_order if scheduled else self._by_data
        run(self._module.entry, 0.0)
        return self._lanes.timeline()

    def _in_order(self, name: str, now: float) -> float:
        """Run a computation in its order; return when it is done."""
        scope = self._module.computations[name]
        there: dict[str, float] = {}
        for x in scope.values():
            if x.opcode.endswith("-done"):
                now = max(now, there.get(x.operands[0], now))
            elif self._takes_link(x):
                there[x.name] = self._travel(x, scope, now)
                if not x.opcode.endswith("-start"):
                    now = there[x.name]
            elif x.opcode == "fusion-start":  # a copy that runs beside the computation
                there[x.name] = now + self._seconds(x, scope)
            else:
                now = self._run(x, scope, now, self._in_order)
        return now

    def _by_data(self, name: str, now: float) -> float:
        """Run a computation in the order of its data; return when its result is there."""
        scope = self._module.computations[name]
        there: dict[str, float] = {}
        for x in _in_ready_order(scope, there):
            start = max([now, *(there[o] for o in x.operands if o in there)])
            if self._takes_link(x) and not x.opcode.endswith("-done"):
                there[x.name] = self._travel(x, scope, start)
            else:
                there[x.name] = self._run(x, scope, start, self._by_data)
        return max((there[x.name] for x in scope.values() if x.is_root), default=now)

    def _takes_link(self, x: hlo.Instruction) -> bool:
        return x.name in self._collectives or (x.opcode == "copy-start" and _ON_HOST in x.type_text)

    def _travel(self, x: hlo.Instruction, scope: dict[str, hlo.Instruction], now: float) -> float:
        """Take a link for a collective, or for a copy to or from the host; return when it ends."""
        if not self._counts(x):
            return now
        if x.name not in self._collectives:
            num_bytes = sum(s.num_bytes for name in x.operands for s in scope[name].shapes)
            what = Origin(phase=phase_of(x.op_name, ""), text=x.name, num_bytes=num_bytes)
            return self._lanes.take(HOST, now, self._target.host_s(num_bytes), x.op_name, what=what)
        if x.name not in self._origins:
            self._origins[x.name] = self._named(self._collectives[x.name])
        lane, seconds, what = self._origins[x.name]
        collective = self._collectives[x.name]
        if not seconds:
            return now
        return self._lanes.take(lane, now, seconds, collective.op_name, collective.kind, what)

    def _named(self, collective: hlo.Collective) -> tuple[str, float, Origin]:
        """Return the lane that a collective takes, for how long, and what it brings.

        A flat one takes the link of the axis that takes longest.
        """
        arrays = collective.results if collective.kind == "all-gather" else collective.operands
        num_bytes = sum(array.num_bytes for array in arrays)
        axes = axes_of(collective, self._target.mesh_shape)
        times = {a: self._target.seconds(a, collective.kind, num_bytes) for a in axes}
        lane = max(times, key=lambda a: times[a], default=COMPUTE)
        phase = phase_of(collective.op_name, collective.kind)
        return lane, times.get(lane, 0.0), self._origin_of(collective, phase, lane)

    def _run(
        self,
        x: hlo.Instruction,
        scope: dict[str, hlo.Instruction],
        now: float,
        run: Callable[[str, float], float],
    ) -> float:
        """Run an instruction that takes no link; return when it is done."""
        if x.opcode == "while":
            return self._loop(x, scope, now, run)
        if x.opcode == "conditional":
            return self._longest(x, now, run)
        if x.opcode in _CALLS:
            for name in x.called:
                now = run(name, now)
            return now
        if not self._counts(x) or x.opcode.endswith("-done"):
            return now
        seconds = self._seconds(x, scope)
        return self._lanes.take(COMPUTE, now, seconds, x.op_name) if seconds else now

    def _seconds(self, x: hlo.Instruction, scope: dict[str, hlo.Instruction]) -> float:
        cost = cost_of(x, scope, self._module)
        work = Work(cost.flops, _DTYPES.get(cost.dtype, "float32"), cost.num_bytes)
        return self._target.compute_s(work)

    def _loop(
        self,
        x: hlo.Instruction,
        scope: dict[str, hlo.Instruction],
        now: float,
        run: Callable[[str, float], float],
    ) -> float:
        trips = trip_count(x, scope, self._module)
        trips = self._while_trips if trips is None else trips
        marks = []
        for _ in range(min(trips, TURNS)):
            now = run(x.attribute("body") or "", now)
            marks.append(self._lanes.mark([now]))
        if trips > TURNS:
            now += self._lanes.repeat(marks[-2], marks[-1], trips - TURNS)
        return now

    def _longest(self, x: hlo.Instruction, now: float, run: Callable[[str, float], float]) -> float:
        before, longest = self._lanes.copy(), (now, self._lanes)
        for name in x.called:
            self._lanes = before.copy()
            end = run(name, now)
            if end >= longest[0]:
                longest = end, self._lanes
        self._lanes = longest[1]
        return longest[0]

    def _counts(self, x: hlo.Instruction) -> bool:
        return self._wanted(x.op_name)


def _in_ready_order(
    scope: Mapping[str, hlo.Instruction], there: Mapping[str, float]
) -> Iterator[hlo.Instruction]:
    """Yield instructions in the order in which their operands are there. The caller fills `there`
    in between."""
    order = list(scope.values())
    waiting: dict[int, int] = {}
    readers: dict[str, list[int]] = {}
    ready: list[tuple[float, int]] = []
    for i, x in enumerate(order):
        operands = {name for name in x.operands if name in scope}
        waiting[i] = len(operands)
        for name in operands:
            readers.setdefault(name, []).append(i)
        if not operands:
            ready.append((0.0, i))
    heapq.heapify(ready)
    while ready:
        _, i = heapq.heappop(ready)
        yield order[i]
        for reader in readers.get(order[i].name, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                arrivals = [there[name] for name in order[reader].operands if name in there]
                heapq.heappush(ready, (max(arrivals, default=0.0), reader))
