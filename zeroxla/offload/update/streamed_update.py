"""The memory of a device while it updates a state that comes from its host in sub-groups.

The update follows the gradients, in the same program (see `offload/update/stream.py`). All arrays
of a sub-group come to the device; then one leaf after another is computed and goes back. A leaf's
new arrays lie beside its old ones, because XLA's one kernel for all of them writes over none.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from zeroxla.program.host_values import is_move, is_value_on_host
from zeroxla.program.live.splits import Splits, bytes_per_device
from zeroxla.program.trace import Equation, Operand, Program, Value


def sub_group_bytes(program: Program, splits: Splits, num_buffers: int) -> int:
    """Return the most bytes of sub-groups that a device holds at a time; 0 if none come.

    Args:
      program: a step's traced program, in which the update is one of arrays over all devices.
      splits: over how many devices each value is split.
      num_buffers: the number of sub-groups that are on the device or on the way at a time. One of
        them is computed.
    """
    groups = [_Group.of(equations, splits) for equations in _groups(program.equations)]
    windows = (groups[i : i + num_buffers] for i in range(len(groups)))
    return max((_most_bytes(window) for window in windows), default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Bytes of a sub-group on one device.

    Attributes:
      arriving: all arrays that come from the host.
      computed: the new arrays that go back, of the leaf that has most of them.
    """

    arriving: int
    computed: int

    @staticmethod
    def of(equations: Iterable[Equation], splits: Splits) -> _Group:
        arriving, leaving, sets = 0, list[Value](), _Sets()
        for eq in equations:
            if _arrives(eq):
                arriving += sum(bytes_per_device(v, splits) for v in eq.outputs)
                sets.begin(eq.outputs)
            elif _leaves(eq):
                leaving += eq.values
            elif eq.name == "optimization_barrier":  # it computes nothing, so it joins nothing
                for operand, out in zip(eq.inputs, eq.outputs, strict=True):
                    sets.join([operand], [out])
            else:
                sets.join(eq.inputs, eq.outputs)
        computed: Counter[Value] = Counter()
        for value in leaving:
            if value in sets:
                computed[sets.first(value)] += bytes_per_device(value, splits)
        return _Group(arriving, max(computed.values(), default=0))


def _most_bytes(groups: Sequence[_Group]) -> int:
    """Return the bytes of sub-groups that are there at a time."""
    return sum(group.arriving for group in groups) + max(group.computed for group in groups)


class _Sets:
    """Sets of values that are computed together, such as a leaf with its moments.

    Each has a first value, which names it. A value points to itself or to an earlier one of its
    set.
    """

    def __init__(self) -> None:
        self._earlier: dict[Operand, Value] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._earlier

    def first(self, value: Operand) -> Value:
        """Return the first value of a value's set."""
        while (earlier := self._earlier[value]) is not value:
            value = earlier
        return earlier

    def begin(self, values: Iterable[Value]) -> None:
        """Begin a set with each value."""
        self._earlier.update((v, v) for v in values)

    def join(self, operands: Iterable[Operand], results: Iterable[Value]) -> None:
        """Make one set of those that operands are in, and add the results to it."""
        firsts = [self.first(v) for v in operands if v in self]
        if firsts:
            self._earlier.update((v, firsts[0]) for v in (*firsts, *results))


def _groups(equations: Iterable[Equation]) -> list[list[Equation]]:
    """Return the equations of each sub-group: it begins with the first move to the device after a
    move back."""
    groups: dict[int, list[Equation]] = defaultdict(list)
    number, is_new = 0, True
    for eq in equations:
        if _arrives(eq) and is_new:
            number, is_new = number + 1, False
        is_new = is_new or _leaves(eq)
        groups[number].append(eq)
    groups.pop(0, None)  # what comes before the first of them
    return list(groups.values())


def _arrives(eq: Equation) -> bool:
    return is_move(eq) and not any(map(is_value_on_host, eq.outputs))


def _leaves(eq: Equation) -> bool:
    return is_move(eq) and any(map(is_value_on_host, eq.outputs))
