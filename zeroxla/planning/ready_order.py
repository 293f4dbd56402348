"""The order in which a program's operands are there, and when each of them is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from zeroxla.program.trace import Equation, Operand, Program, Value


def arrival(operand: Operand, there: Mapping[Value, float]) -> float:
    """Return the second at which an operand is there."""
    return there.get(operand, 0.0) if isinstance(operand, Value) else 0.0


def in_ready_order(program: Program, there: Mapping[Value, float]) -> Iterator[Equation]:
    """Yield the equations in the order in which their operands are there, and if several are ready
    at once, in the program's order. The caller fills `there` in between."""
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
