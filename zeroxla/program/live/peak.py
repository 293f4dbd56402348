"""The bytes that the values of a traced program take: when they are most, and at each equation.

A loop has the values of one turn at a time, beside its carries and its stacked results. Of the
branches of a conditional the largest counts. `liveness.py` says which values exist, and until when.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope, carry_of, size_of
from zeroxla.program.primitives import FUSED, OVERWRITES, RENAMES, RUN_BESIDE, WRITES
from zeroxla.program.trace import Equation, Program, Value
from zeroxla.program.walk import bodies, body_of, scope_path

KindOf = Callable[[Equation, str], str]
"""Names the kind of an equation's results, from the equation and the path of its scopes."""


class Labels(Protocol):
    """Says what the values of one program are."""

    def of(self, eq: Equation, path: str, scope: Scope) -> Sequence[Hashable]:
        """Return a label for each result of an equation; `path` is that of its scopes. Labels of
        values that are not in memory are not read."""
        ...

    def waiting(self, eq: Equation, path: str) -> Hashable:
        """Return the label of a collective's operands, which wait for it through the next turn."""
        ...

    def kind(self, label: Any) -> str:
        """Return the kind of a label, for the curve."""
        ...

    def inside(self, eq: Equation, body: Program, path: str) -> Labels:
        """Return the labels of a program inside an equation whose path is given."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are held while an equation runs, by kind; `path` is that of its scopes."""

    path: str
    num_bytes: Counter[str]


@dataclasses.dataclass(slots=True)
class LiveBytes:
    """The bytes of the values that a program makes.

    Attributes:
      most: when they are most, by label.
      curve: at one equation after another, without those that only rename or are fused; of a loop,
        those of one turn. Empty if not asked for.
    """

    most: Counter[Any] = dataclasses.field(default_factory=Counter)
    curve: list[Moment] = dataclasses.field(default_factory=list)


def peak_bytes(scope: Scope, kind_of: KindOf = lambda eq, path: "", path: str = "") -> Counter[str]:
    """Return the bytes of the values that a program makes, by kind, when they have most.

    Args:
      scope: the program's values.
      kind_of: names the kind of an equation's results.
      path: path of the scopes around the program.
    """
    return live_bytes(scope, _ByKind(kind_of), path).most


@dataclasses.dataclass(frozen=True, slots=True)
class _ByKind:
    """Labels that are kinds."""

    kind_of: KindOf

    def of(self, eq: Equation, path: str, scope: Scope) -> Sequence[str]:
        return [self.kind_of(eq, path)] * len(eq.outputs)

    def waiting(self, eq: Equation, path: str) -> str:
        return self.kind_of(eq, path)

    def kind(self, label: str) -> str:
        return label

    def inside(self, eq: Equation, body: Program, path: str) -> _ByKind:
        return self


def live_bytes(scope: Scope, labels: Labels, path: str = "", *, curve: bool = False) -> LiveBytes:
    """Return the bytes of the values that a program makes.

    Args:
      scope: the program's values.
      labels: says what they are.
      path: path of the scopes around the program.
      curve: whether to note them at each equation too.
    """
    held = _Held(labels.kind if curve else None)
    ends: dict[int, list[Value]] = {}
    for value in scope.in_memory:
        ends.setdefault(scope.last_use.get(value, -1), []).append(value)
    for i, eq in enumerate(scope.program.equations):
        here = scope_path(eq, path)
        named = dict(zip(eq.outputs, labels.of(eq, here, scope), strict=True))
        made = [v for v in eq.outputs if v in scope.in_memory and v not in scope.roots]
        held.name({v: named[v] for v in made})
        carries = {scope.roots.get(v): named[v] for v in eq.outputs[: carry_of(eq)[1]]}
        held.rename({v: label for v, label in carries.items() if v is not None and v in held})
        read_last = [v for v in ends.get(i, ()) if v in held]
        if eq.name in FUSED or eq.name in WRITES:  # The results take the place of these operands.
            held.drop(read_last)
            held.add(made)
            held.note(here, shown=bool(made) or eq.name in WRITES)
        else:
            held.add(made)
            inside = _inside(eq, scope.platform, labels, here, curve=curve)
            held.note(here, inside, shown=eq.name not in RENAMES)
            held.drop(read_last)
        never_read = (v for v in made if scope.last_use.get(v, i) <= i and v not in read_last)
        held.drop(never_read)
    return held.found


class _Held:
    """The bytes that are held now, by label, and those held when they were most.

    Args:
      kind: the kind of a label, for a curve; None without a curve.
    """

    def __init__(self, kind: Callable[[Any], str] | None) -> None:
        self.found = LiveBytes()
        self._kind = kind
        self._now: Counter[Hashable] = Counter()
        self._by_kind: Counter[str] = Counter()
        self._total = self._most = 0
        self._labels: dict[Value, Hashable] = {}

    def __contains__(self, value: object) -> bool:
        """Whether the value has a label, that is, was made by the program."""
        return value in self._labels

    def name(self, labels: dict[Value, Hashable]) -> None:
        """Set the labels of values that are not held yet."""
        self._labels.update(labels)

    def rename(self, labels: dict[Value, Hashable]) -> None:
        """Change the labels of values that are held."""
        self.drop(labels)
        self.name(labels)
        self.add(labels)

    def add(self, values: Iterable[Value], sign: int = 1) -> None:
        for value in values:
            label, num_bytes = self._labels[value], sign * size_of(value)
            self._now[label] += num_bytes
            self._total += num_bytes
            if self._kind is not None:
                self._by_kind[self._kind(label)] += num_bytes

    def drop(self, values: Iterable[Value]) -> None:
        self.add(values, -1)

    def note(self, path: str, inside: LiveBytes | None = None, *, shown: bool) -> None:
        """Remember what is held now, with the bytes of what runs inside the equation; the curve
        has the moment if it is `shown`."""
        total = self._total + (inside.most.total() if inside else 0)
        if total > self._most:
            self._most = total
            self.found.most = self._now + inside.most if inside else +self._now
        if self._kind is not None and shown:
            below = inside.curve if inside and inside.curve else [Moment(path, Counter())]
            self.found.curve += (Moment(m.path, self._by_kind + m.num_bytes) for m in below)


def _inside(
    eq: Equation, platform: str, labels: Labels, path: str, *, curve: bool
) -> LiveBytes | None:
    """Return the bytes of the values that a loop or branch makes inside; None if nothing is."""
    if eq.name == "cond":
        branches = map(body_of, compat.branches_for(eq.params, platform))
        found = (
            live_bytes(_branch(b, platform), labels.inside(eq, b, path), path, curve=curve)
            for b in branches
        )
        return max(found, key=lambda live: live.most.total())
    inside = None
    for body, _ in bodies(eq):
        mine = labels.inside(eq, body, path)
        inside = live_bytes(_turn(eq, body, platform), mine, path, curve=curve)
        waiting: Counter[Hashable] = Counter()
        for late in _into_next_turn(eq, body) if platform == "gpu" else ():
            label = mine.waiting(late, scope_path(late, path))
            waiting[label] += sum(map(size_of, late.values))
        if waiting:
            by_kind: Counter[str] = Counter()
            for label, num_bytes in waiting.items():
                by_kind[mine.kind(label)] += num_bytes
            inside.most += waiting
            inside.curve = [Moment(m.path, m.num_bytes + by_kind) for m in inside.curve]
    return inside


def _branch(body: Program, platform: str) -> Scope:
    """Return a branch's values without its results: those are the conditional's own, and counted
    outside."""
    scope = Scope.of(body, platform)
    results = {scope.roots.get(v, v) for v in body.outputs if isinstance(v, Value)}
    return dataclasses.replace(scope, in_memory=scope.in_memory - results)


def _turn(eq: Equation, body: Program, platform: str) -> Scope:
    """Return the values of one turn of a loop.

    A stacked result goes to its place at once. So does a new carry, if the old one is no longer
    needed by then.
    """
    first, num_carry = carry_of(eq)
    first -= eq.params.get("cond_nconsts", 0)
    carried, stacked = body.outputs[:num_carry], body.outputs[num_carry:]
    scope = Scope.of(dataclasses.replace(body, outputs=carried), platform)
    equations = scope.program.equations
    made = {v: i for i, eq in enumerate(equations) for v in eq.outputs}
    last = dict(scope.last_use)
    for value in (scope.roots.get(v, v) for v in stacked if isinstance(v, Value)):
        if value in made:
            last[value] = max(last.get(value, -1), made[value])
    in_place = set()
    for before, out in zip(body.inputs[first:], carried, strict=False):
        value = scope.roots.get(out, out) if isinstance(out, Value) else None
        if value in made:
            when = made[value] + (equations[made[value]].name in OVERWRITES)
            if last.get(before, -1) < when and before.aval.size == value.aval.size:
                in_place.add(value)
    return dataclasses.replace(scope, last_use=last, in_memory=scope.in_memory - in_place)


def _into_next_turn(eq: Equation, body: Program) -> list[Equation]:
    """Return the collectives of a turn that may run beside the next turn.

    Their results are stacked, and nothing in the turn waits for them. If several follow one
    another, the first is returned: its operands are there when the turn ends.
    """
    passed_on = (FUSED | RENAMES | RUN_BESIDE) - {"optimization_barrier"}
    wanted = {v for v in body.outputs[carry_of(eq)[1] :] if isinstance(v, Value)}
    chain = []
    for inner in reversed(body.equations):
        if inner.name in passed_on and not wanted.isdisjoint(inner.outputs):
            chain.append(inner)
            wanted.update(inner.values)
    behind: set[Value] = set()
    found = []
    for inner in reversed(chain):
        is_behind = not behind.isdisjoint(inner.values)
        if inner.name in RUN_BESIDE and not is_behind:
            found.append(inner)
        if is_behind or inner.name in RUN_BESIDE:
            behind.update(inner.outputs)
    return found
