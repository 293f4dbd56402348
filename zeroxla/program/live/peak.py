"""The most bytes that the values of a traced program take at one time, by kind.

A loop has the values of one turn at a time, beside its carries and its stacked results. Of the
branches of a conditional the largest counts. `liveness.py` says which values exist, and until when.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable

from zeroxla.program import compat
from zeroxla.program.live.liveness import Scope, carry_of, size_of
from zeroxla.program.primitives import FUSED, OVERWRITES, RENAMES, RUN_BESIDE, WRITES
from zeroxla.program.trace import Equation, Program, Value
from zeroxla.program.walk import bodies, body_of, scope_path

KindOf = Callable[[Equation, str], str]
"""Names the kind of an equation's results, from the equation and the path of its scopes."""


def peak_bytes(scope: Scope, kind_of: KindOf = lambda eq, path: "", path: str = "") -> Counter[str]:
    """Return the bytes of the values that a program makes, by kind, when they have most.

    Args:
      scope: the program's values.
      kind_of: names the kind of an equation's results.
      path: path of the scopes around the program.
    """
    held = _Held()
    ends: dict[int, list[Value]] = {}
    for value in scope.in_memory:
        ends.setdefault(scope.last_use.get(value, -1), []).append(value)
    for i, eq in enumerate(scope.program.equations):
        here = scope_path(eq, path)
        kind = kind_of(eq, here)
        made = [v for v in eq.outputs if v in scope.in_memory and v not in scope.roots]
        held.name(made, kind)
        carries = (scope.roots.get(v) for v in eq.outputs[: carry_of(eq)[1]])
        held.rename([v for v in carries if v is not None and v in held], kind)
        read_last = [v for v in ends.get(i, ()) if v in held]
        if eq.name in FUSED or eq.name in WRITES:  # The results take the place of these operands.
            held.drop(read_last)
            held.add(made)
            held.note()
        else:
            held.add(made)
            held.note(_bytes_inside(eq, scope.platform, kind_of, here))
            held.drop(read_last)
        never_read = (v for v in made if scope.last_use.get(v, i) <= i and v not in read_last)
        held.drop(never_read)
    return held.most


class _Held:
    """The bytes that are held now, by kind, and those held when they were most."""

    def __init__(self) -> None:
        self.most: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._kinds: dict[Value, str] = {}

    def __contains__(self, value: object) -> bool:
        """Whether the value has a kind, that is, was made by the program."""
        return value in self._kinds

    def name(self, values: Iterable[Value], kind: str) -> None:
        """Set the kind of values that are not held yet."""
        self._kinds.update(dict.fromkeys(values, kind))

    def rename(self, values: list[Value], kind: str) -> None:
        """Change the kind of values that are held."""
        self.drop(values)
        self.name(values, kind)
        self.add(values)

    def add(self, values: Iterable[Value]) -> None:
        for value in values:
            self._now[self._kinds[value]] += size_of(value)

    def drop(self, values: Iterable[Value]) -> None:
        for value in values:
            self._now[self._kinds[value]] -= size_of(value)

    def note(self, beside: Counter[str] | None = None) -> None:
        """Remember what is held now, with the bytes beside it, if it is the most so far."""
        now = self._now if beside is None else self._now + beside
        if now.total() > self.most.total():
            self.most = now.copy()


def _bytes_inside(eq: Equation, platform: str, kind_of: KindOf, path: str) -> Counter[str]:
    """Return the bytes of the values that a loop or branch makes inside, by kind."""
    if eq.name == "cond":
        branches = map(body_of, compat.branches_for(eq.params, platform))
        found = (peak_bytes(_branch(branch, platform), kind_of, path) for branch in branches)
        return max(found, key=Counter.total)
    inside: Counter[str] = Counter()
    for body, _ in bodies(eq):
        inside += peak_bytes(_turn(eq, body, platform), kind_of, path)
        for late in _into_next_turn(eq, body) if platform == "gpu" else ():
            inside[kind_of(late, scope_path(late, path))] += sum(map(size_of, late.values))
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
