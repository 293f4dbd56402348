"""`ResidualGraph`: what a segment's residuals are computed from, with bytes and seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from zeroxla.fetch.traced_segment import TracedSegment
from zeroxla.program.flops import flops_of, product_flops
from zeroxla.program.primitives import EXPENSIVE, FUSED, LOOPS, RANDOM, REDUCTIONS, RENAMES
from zeroxla.program.trace import Equation, Value, bytes_of, closure

OF_A_KERNEL = 1 / 8
"""An elementwise equation's share of a pass over its result. A compiler makes one kernel of a chain
of them and of the equations that read its end. The share is a guess that fits one GPT on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRates:
    """What computing again and moving costs on a device.

    Attributes:
      flops_per_s: FLOPs of products in a second.
      bytes_per_s: bytes of the device's memory in a second.
      gathered_bytes_per_s: bytes of leaves that backward gathers in a second.
      sent_bytes_per_s: bytes of leaves that forward gathers in a second.
      reduced_bytes_per_s: bytes of leaves whose gradients are reduced in a second.
      gathers_beside: whether gathers run beside computation.
      host_bytes_per_s: bytes between the device and its host in a second; None keeps values off the
        host.
    """

    flops_per_s: float = 4e14
    bytes_per_s: float = 2e12
    gathered_bytes_per_s: float = 1e11
    sent_bytes_per_s: float = 1e11
    reduced_bytes_per_s: float = 5e10
    gathers_beside: bool = True
    host_bytes_per_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ResidualGraph:
    """The equations that compute a segment's residuals, as numbers.

    A value is available in backward if it is kept, or if the equation that makes it runs again,
    for which that equation's operands must be available. What backward has anyway (leaves that it
    gathers, constants, what follows from them) is no part of the graph.

    Attributes:
      values: the values; a value is known by its place here.
      bytes: the bytes of keeping each value: 0 if it stays in memory anyway.
      maker: the number of the equation that makes each value; -1 if it cannot be made again.
      residuals: the values that the derivative reads.
      seconds: the seconds of running each equation again.
      flops: the FLOPs of its products, and one for each element of other results.
      reads: the values that each equation reads.
      renames: whether each equation only gives its first operand another shape or name.
      fused: whether a compiler computes each equation inside those that read its result, which then
        is never in memory.
      gathers: the leaves that each equation reads and backward does not gather otherwise.
      gather_seconds: the seconds of gathering each such leaf.
      host_seconds: the seconds of sending each value to the host and back, if nothing runs beside
        that; infinite if it stays.
    """

    values: tuple[Value, ...]
    bytes: tuple[int, ...]
    maker: tuple[int, ...]
    residuals: tuple[int, ...]
    seconds: tuple[float, ...]
    flops: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    renames: tuple[bool, ...]
    fused: tuple[bool, ...]
    gathers: tuple[tuple[int, ...], ...]
    gather_seconds: tuple[float, ...]
    host_seconds: tuple[float, ...]

    @property
    def signature(self) -> tuple:
        """What two graphs have in common if the same numbers solve both."""
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "values")

    def bytes_in_backward(self, on_device: Collection[int], again: Collection[int]) -> int:
        """Return the bytes of the residuals and of what is kept while all of them are there.

        What only renames another value shares its memory, and of a chain that is fused into what
        reads its end only what the chain begins with is in memory.

        Args:
          on_device: the values that are kept.
          again: the equations that run again.
        """
        found: set[int] = set()
        stack, seen = [*self.residuals, *on_device], set[int]()
        while stack:
            if (value := stack.pop()) in seen:
                continue
            seen.add(value)
            eq = self.maker[value]
            if eq >= 0 and self.renames[eq]:
                stack.append(self.reads[eq][0])
            elif eq in again and self.fused[eq]:
                stack.extend(self.reads[eq])
            else:
                found.add(value)
        return sum(self.bytes[v] for v in found)

    @staticmethod
    def of(traced: TracedSegment, rates: DeviceRates, lasting: Collection[Value]) -> ResidualGraph:
        """Read the graph of a segment.

        Args:
          traced: the segment with its derivative.
          rates: what an equation, a gather and a move cost.
          lasting: inputs and outputs of the segment that stay in memory until its backward anyway.
        """
        program, free = traced.program, traced.from_free()
        wanted, equations, values = _read(traced)
        number = {v: i for i, v in enumerate(values)}
        maker = {v: i for i, eq in enumerate(equations) for v in eq.outputs}
        shared = dict(zip(traced.segment.outputs, traced.results, strict=True)) | traced.stand_ins
        stays = {shared[v] for v in lasting if v in shared}
        inputs = frozenset(program.inputs)
        sizes = [0 if v in stays else bytes_of(v) for v in values]
        gathers, gather_seconds = _gathers(traced, equations, free, rates)
        per_host_byte = 2 / rates.host_bytes_per_s if rates.host_bytes_per_s else float("inf")
        return ResidualGraph(
            values=values,
            bytes=tuple(sizes),
            maker=tuple(maker.get(v, -1) for v in values),
            residuals=tuple(dict.fromkeys(number[v] for v in wanted)),
            seconds=tuple(seconds_of(eq, rates) for eq in equations),
            flops=tuple(0.0 if eq.name in RENAMES else flops_of(eq) for eq in equations),
            reads=tuple(
                tuple(number[v] for v in dict.fromkeys(eq.values) if v in number)
                for eq in equations
            ),
            renames=tuple(
                eq.name in RENAMES and any(v in number for v in eq.values[:1]) for eq in equations
            ),
            fused=tuple(eq.name in FUSED - EXPENSIVE - RANDOM for eq in equations),
            gathers=gathers,
            gather_seconds=gather_seconds,
            # The inputs of a segment are kept by reference, where they are.
            host_seconds=tuple(
                float("inf")
                if v in inputs or v in stays or not v.is_float
                else size * per_host_byte
                for v, size in zip(values, sizes, strict=True)
            ),
        )


def values_of(traced: TracedSegment) -> tuple[Value, ...]:
    """Return the values of a segment's graph."""
    return _read(traced)[2]


def _read(
    traced: TracedSegment,
) -> tuple[list[Value], list[Equation], tuple[Value, ...]]:
    """Return a segment's residuals that backward has not anyway, the equations that compute them,
    and the values of both."""
    free = traced.from_free()
    producers = {v: eq for v, eq in traced.producers().items() if v not in free}
    wanted = [v for v in traced.residuals if isinstance(v, Value) and v not in free]
    equations, _ = closure(wanted, producers)
    values = dict.fromkeys([*(v for eq in equations for v in (*eq.values, *eq.outputs)), *wanted])
    return wanted, [*equations], tuple(v for v in values if v not in free)


def seconds_of(eq: Equation, rates: DeviceRates) -> float:
    """Return the seconds of an equation: those of its products, or of its bytes if they take
    longer. What only renames takes none."""
    if eq.name in RENAMES:
        return 0.0
    moved = sum(map(bytes_of, eq.outputs))
    if eq.name in FUSED - RANDOM:
        return OF_A_KERNEL * moved / rates.bytes_per_s
    flops = product_flops(eq)
    if flops or eq.name in REDUCTIONS | LOOPS | {"cond"}:
        flops = flops or flops_of(eq)
        moved += sum(map(bytes_of, eq.values))
    return max(flops / rates.flops_per_s, moved / rates.bytes_per_s)


def _gathers(
    traced: TracedSegment,
    equations: Collection[Equation],
    free: Collection[Value],
    rates: DeviceRates,
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return the leaves that each equation needs and the derivative alone does not, by number, and
    the seconds of gathering each."""
    leaves = {traced.stand_ins[v] for v in traced.segment.leaves}
    producers = {v: eq for v, eq in traced.producers().items() if v in free}
    gathered = {traced.stand_ins[v] for v in traced.leaves_of_backward()}
    number: dict[Value, int] = {}
    needs = {
        eq: tuple(
            number.setdefault(v, len(number))
            for v in closure([a for a in eq.values if a in free], producers)[1]
            if v in leaves and v not in gathered
        )
        for eq in equations
    }
    seconds = tuple(bytes_of(v) / rates.gathered_bytes_per_s for v in number)
    return tuple(needs[eq] for eq in equations), seconds
