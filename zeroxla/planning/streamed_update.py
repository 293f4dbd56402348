"""The memory of a device while it updates a state that comes from its host in sub-groups.

The update follows the gradients, in the same program (see `offload/update/stream.py`). Of a
sub-group all arrays come to the device; then one leaf after another is computed and goes back. XLA
has a leaf's new arrays beside its old ones, as one kernel makes them all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from zeroxla.offload.memory_kinds import is_value_on_host
from zeroxla.planning.splits import Splits, bytes_per_device
from zeroxla.planning.timeline import is_move
from zeroxla.program.trace import Equation, Program, Value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamedUpdate:
    """A device's temporaries in an update that comes in sub-groups.

    Attributes:
      gradient_bytes: the shards of the gradients.
      sub_group_bytes: the most bytes of sub-groups at a time.
    """

    gradient_bytes: int = 0
    sub_group_bytes: int = 0

    @staticmethod
    def of(
        program: Program, splits: Splits, *, num_leaves: int, num_buffers: int
    ) -> StreamedUpdate:
        """Read a step's traced program.

        Args:
          program: the program, in which the update is one of arrays over all devices.
          splits: over how many devices each value is split.
          num_leaves: the number of the model's leaves.
          num_buffers: the number of sub-groups that are on the device or on the way at a time.
        """
        groups = [_Group.of(equations, splits) for equations in _groups(program.equations)]
        windows = [groups[i : i + num_buffers] for i in range(len(groups))]
        most = (
            sum(g.arriving_bytes for g in window) + max(g.computed_bytes for g in window)
            for window in windows
        )
        return StreamedUpdate(
            gradient_bytes=_gradient_bytes(program, splits, num_leaves),
            sub_group_bytes=max(most, default=0),
        )

    @property
    def total_bytes(self) -> int:
        """The bytes of both."""
        return self.gradient_bytes + self.sub_group_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Bytes of a sub-group on one device.

    Attributes:
      arriving_bytes: all arrays that come from the host.
      computed_bytes: the new arrays that go back of the leaf that has most of them.
    """

    arriving_bytes: int
    computed_bytes: int

    @staticmethod
    def of(equations: Iterable[Equation], splits: Splits) -> _Group:
        arriving, first = 0, _Firsts()
        computed: Counter[Value] = Counter()
        leaving: list[tuple[Value, int]] = []
        for eq in equations:
            if _arrives(eq):
                arriving += sum(bytes_per_device(v, splits) for v in eq.outputs)
                first.begin(eq.outputs)
            elif _leaves(eq):
                leaving += [(v, bytes_per_device(v, splits)) for v in eq.values if v in first]
            elif eq.name != "optimization_barrier":  # it makes nothing
                first.join(eq.values, eq.outputs)
        for value, num_bytes in leaving:
            computed[first[value]] += num_bytes
        return _Group(arriving, max(computed.values(), default=0))


class _Firsts:
    """The sets of values that are computed together; each has a first one, which names it."""

    def __init__(self) -> None:
        self._before: dict[Value, Value] = {}

    def __contains__(self, value: object) -> bool:
        return value in self._before

    def __getitem__(self, value: Value) -> Value:
        while (before := self._before[value]) is not value:
            value = before
        return value

    def begin(self, values: Iterable[Value]) -> None:
        """Begin a set with each of some values."""
        self._before.update((v, v) for v in values)

    def join(self, values: Iterable[Value], made: Iterable[Value]) -> None:
        """Make one set of those that values are in, with what is made from the values."""
        firsts = [self[v] for v in values if v in self]
        if firsts:
            self._before.update((v, firsts[0]) for v in (*firsts, *made))


def _groups(equations: Sequence[Equation]) -> list[list[Equation]]:
    """Return the equations of each sub-group: it begins with the first move to the device after a
    move back."""
    groups: dict[int, list[Equation]] = defaultdict(list)
    number, is_leaving = 0, True
    for eq in equations:
        if _arrives(eq) and is_leaving:
            number, is_leaving = number + 1, False
        is_leaving |= _leaves(eq)
        groups[number].append(eq)
    groups.pop(0, None)  # what is computed before the first
    return list(groups.values())


def _gradient_bytes(program: Program, splits: Splits, num_leaves: int) -> int:
    """Return the bytes of the gradients that the update reads: the first results of the part that
    each device runs. Frozen leaves have some that nothing reads."""
    (mapped,) = (eq for eq in program.equations if eq.name == "shard_map")
    gradients = dict.fromkeys(mapped.outputs[:num_leaves])
    read: set[Value] = set()
    barred = dict(zip(gradients, gradients, strict=True))
    for eq in program.equations:
        if eq.name == "optimization_barrier":
            pairs = zip(eq.inputs, eq.outputs, strict=True)
            barred.update((out, barred[v]) for v, out in pairs if v in barred)
        else:
            read.update(barred[v] for v in eq.values if v in barred)
    return sum(bytes_per_device(v, splits) for v in read)


def _arrives(eq: Equation) -> bool:
    return is_move(eq) and not any(map(is_value_on_host, eq.outputs))


def _leaves(eq: Equation) -> bool:
    return is_move(eq) and any(map(is_value_on_host, eq.outputs))
