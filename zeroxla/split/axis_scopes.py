"""The rows of a picture of a plan: in order, the arrays of each module and how devices hold them.

Equations that stand together and whose arrays devices hold alike are one row. Small arrays are left
out, and blocks that are written out one after another and are alike are shown once.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from zeroxla.program.primitives import READS_OF_LEAVES
from zeroxla.program.trace import Equation, Value, bytes_of
from zeroxla.split.conversions import Conversion, RanEquation, events_of
from zeroxla.split.holdings import Holding
from zeroxla.split.ways import AxisPlan, Way

SMALL_ARRAY = 1 / 8
"""Arrays are left out that have less than this share of the median of those made with leaves."""
SMALL_CONVERSION = 1 / 100
"""Conversions are left out that move less than this share of all bytes."""
_WRAPPERS = re.compile(r"\b(?:jvp|transpose|vmap|remat|checkpoint)\(([^()]*)\)")
_NUMBER = re.compile(r"\d+")
_BLOCK = re.compile(r"(?:^|/)[^/]*?\d+(?=/|$)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeafRead:
    """A leaf that an equation reads.

    Attributes:
      name: its path; "" if it is not known.
      shape: its shape, in a loop that of a turn's slice.
      held: how devices hold it.
    """

    name: str
    shape: tuple[int, ...]
    held: Holding


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AxisMove:
    """A conversion in a row.

    Attributes:
      forward, backward: the collectives; None if nothing travels.
      forward_bytes, backward_bytes: what a device receives each time that the row is run, or
        before the loop.
      outside: whether it happens before the loop that the row is in.
      in_backward: whether it happens in the backward program of a derivative of the model's own.
    """

    forward: str | None
    backward: str | None
    forward_bytes: float
    backward_bytes: float
    outside: bool
    in_backward: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScopeRow:
    """Arrays that stand together, and that devices hold alike.

    Attributes:
      scope: the module, or the named scope, that computes them; "" if the model names none.
      operation: the equation that gives the largest of them.
      shape, dtype, num_bytes: the largest of them, whole.
      held: how devices hold them; it has no class.
      leaf: the largest leaf that is read to compute them.
      times: how often the row runs in a step's forward.
      before: the conversions that are made first.
      after: the conversions in the backward program of a derivative of the model's own.
    """

    scope: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    held: Holding
    leaf: LeafRead | None
    times: int
    before: tuple[AxisMove, ...] = ()
    after: tuple[AxisMove, ...] = ()

    @property
    def name(self) -> str:
        """The scope; else the leaf; else the equation."""
        return self.scope or (self.leaf.name if self.leaf else "") or self.operation


def scope_rows(plan: AxisPlan, parts: int, names: Sequence[str] = ()) -> tuple[ScopeRow, ...]:
    """Return the rows of a plan.

    Args:
      plan: the plan.
      parts: the length of the axis.
      names: the paths of the leaves, which are the program's first inputs.
    """
    events = list(events_of(plan, parts))
    conversions = [x for x in events if isinstance(x, Conversion)]
    least = SMALL_CONVERSION * sum(sum(c.received(parts)) for c in conversions)
    drawn = [x for x in events if isinstance(x, RanEquation) or sum(x.received(parts)) >= least]
    return _folded(_merged(_large(list(_rows(drawn, parts, names)))))


def _rows(
    events: Iterable[Conversion | RanEquation], parts: int, names: Sequence[str]
) -> Iterator[ScopeRow]:
    """Yield a row for each equation that has floating results and no rows of its own inside."""
    pending: list[Conversion] = []
    after: list[Conversion] = []
    last: ScopeRow | None = None
    for event in events:
        if isinstance(event, Conversion):
            if event.forward or event.backward:
                (after if event.in_backward else pending).append(event)
            continue
        row = None if event.in_backward else _row(event, names)
        if row is None:
            continue
        if last is not None:
            yield dataclasses.replace(last, after=_moves(after, parts, last.times))
            after = []
        last = dataclasses.replace(row, before=_moves(pending, parts, row.times))
        pending = []
    if last is not None:
        yield dataclasses.replace(last, after=_moves([*pending, *after], parts, last.times))


def _moves(conversions: Iterable[Conversion], parts: int, times: int) -> tuple[AxisMove, ...]:
    found = []
    for c in sorted(conversions, key=lambda c: c.times >= times):
        there, back = (num / min(times, c.times) for num in c.received(parts))
        found.append(
            AxisMove(
                forward=c.forward,
                backward=c.backward,
                forward_bytes=there,
                backward_bytes=back,
                outside=c.times < times,
                in_backward=c.in_backward,
            )
        )
    return tuple(found)


def _row(ran: RanEquation, names: Sequence[str]) -> ScopeRow | None:
    """Return the row of an equation; None if it has none."""
    flow, eq = ran.plan.flow, ran.equation
    if _has_rows(ran.way) or not all(_has_rows(way) for _, way in ran.inside):
        return None
    given = [
        (v, held)
        for v, held in zip(eq.outputs, ran.way.kept, strict=False)
        if v.is_float and flow.is_computed(v) and not flow.made_of_leaves(v)
    ]
    if not given:
        return None
    value, held = max(given, key=lambda pair: bytes_of(pair[0]))
    stacks = [str(outer.name_stack) for outer, _ in ran.inside]
    scopes = [_scope_in_words(text) for text in (*stacks, str(eq.name_stack))]
    sums = [part for part in str(eq.name_stack).split("/") if "->" in part]
    return ScopeRow(
        scope=next(filter(None, reversed(scopes)), ""),
        operation=sums[-1] if sums else eq.name,
        shape=tuple(value.aval.shape),
        dtype=str(value.aval.dtype),
        num_bytes=bytes_of(value),
        held=_without_class(held),
        leaf=_leaf_of(ran, names),
        times=ran.times,
    )


def _has_rows(way: Way) -> bool:
    """Return whether the equations of a way's body are rows: those of loops over layers are, those
    of an attention in blocks are not."""
    return way.body is not None and any(
        _reads_leaf(way.body, eq) or _has_rows(inner) for eq, inner in way.body.steps
    )


def _reads_leaf(plan: AxisPlan, eq: Equation) -> bool:
    return eq.name in READS_OF_LEAVES and any(
        plan.flow.made_of_leaves(v) and len(v.aval.shape) > 1 for v in eq.values
    )


def _leaf_of(ran: RanEquation, names: Sequence[str]) -> LeafRead | None:
    flow, eq = ran.plan.flow, ran.equation
    if not _reads_leaf(ran.plan, eq):
        return None
    pairs = zip(eq.inputs, ran.way.needs, strict=True)
    read = [(v, held) for v, held in pairs if isinstance(v, Value) and flow.made_of_leaves(v)]
    value, (held, *_) = max(read, key=lambda pair: bytes_of(pair[0]))
    numbers = flow.leaves_of(value)
    name = names[min(numbers)] if len(numbers) == 1 and min(numbers) < len(names) else ""
    return LeafRead(name=name, shape=tuple(value.aval.shape), held=_without_class(held))


def _without_class(held: Holding) -> Holding:
    return Holding(held.kind, held.dim)


def _scope_in_words(name_stack: str) -> str:
    """Return a scope without derivatives and without the sums of einsums."""
    while (text := _WRAPPERS.sub(r"\1", name_stack)) != name_stack:
        name_stack = text
    return "/".join(part for part in name_stack.split("/") if part and "->" not in part)


def _large(rows: list[ScopeRow]) -> list[ScopeRow]:
    """Leave out rows of small arrays that nothing is converted for."""
    with_leaves = [row.num_bytes for row in rows if row.leaf]
    least = SMALL_ARRAY * median(with_leaves) if with_leaves else 0
    return [row for row in rows if row.num_bytes >= least or row.leaf or row.before or row.after]


def _merged(rows: Iterable[ScopeRow]) -> list[ScopeRow]:
    """Make one row of those that stand together and are held alike; a leaf begins a new one."""
    found: list[ScopeRow] = []
    for row in rows:
        last = found[-1] if found else None
        alike = last and _place(row) == _place(last)
        if last is None or not alike or row.leaf or row.before or last.after:
            found.append(row)
            continue
        largest = max(last, row, key=lambda each: each.num_bytes)
        kept = dataclasses.replace(
            largest, operation=last.operation, leaf=last.leaf, before=last.before, after=row.after
        )
        found[-1] = kept if last.leaf is None else dataclasses.replace(last, after=row.after)
    return found


def _place(row: ScopeRow) -> tuple[list[str], Holding, int]:
    """Return what rows must share to be one. The beginning of a scope depends on derivatives."""
    return row.scope.split("/")[-2:], row.held, row.times


def _folded(rows: list[ScopeRow]) -> tuple[ScopeRow, ...]:
    """Show once the blocks that stand one after another and are alike but for their number."""
    blocks: list[list[ScopeRow]] = []
    for block, group in itertools.groupby(_numbered(rows), key=lambda pair: pair[0]):
        mine = [row for _, row in group]
        last = blocks[-1] if blocks else []
        if block and list(map(_alike, last)) == list(map(_alike, mine)):
            blocks[-1] = [dataclasses.replace(row, times=row.times + mine[0].times) for row in last]
        else:
            blocks.append(mine)
    return tuple(itertools.chain.from_iterable(blocks))


def _numbered(rows: Iterable[ScopeRow]) -> Iterator[tuple[str, ScopeRow]]:
    """Yield each row with its block: the module with a number in its name, or ""."""
    block = ""
    for row in rows:
        known = row.scope or (row.leaf.name if row.leaf else "")
        match = _BLOCK.search(known)
        if known:
            block = known[: match.end()] if match else ""
        yield block, row


def _alike(row: ScopeRow) -> ScopeRow:
    """Return a row without the numbers of its names, and run once."""
    leaf = row.leaf and dataclasses.replace(row.leaf, name=_NUMBER.sub("", row.leaf.name))
    return dataclasses.replace(row, scope=_NUMBER.sub("", row.scope), leaf=leaf, times=1)
