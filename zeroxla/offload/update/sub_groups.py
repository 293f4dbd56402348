"""Cuts an optimizer's update into pieces that can be computed one after another.

The update is traced, and its program says which results follow from which arrays. Results that
follow from the same offloaded arrays are one piece: for most optimizers a leaf with its moments.
Pieces are packed into sub-groups. What several sub-groups need (a norm, a schedule) is computed
once, and what is returned as it came (a frozen leaf) is in no piece. A piece of stacked leaves that
is too large is cut again, into layers, where these are independent (see `rows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zeroxla.offload.update.rows import Rows, in_rows, run_rows, with_rows
from zeroxla.program.chunks import packed
from zeroxla.program.trace import Atom, Equation, Program, Value, closure, run, trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SubGroup:
    """What is computed at a time.

    Attributes:
      arrays: the offloaded arrays that come for it.
      results: positions of the results.
      equations: that make them, but for what is shared.
      reads: what these need besides `arrays`: other inputs, and what is shared.
      scalars: of these or of `equations`, those that are used once here and more often in the
        update: how often decides whether XLA divides by a number, or multiplies by its reciprocal.
      rows: of its arrays, results and what has rows among `reads`, if it is of some only; the
        groups of the others follow each other.
      having: the values that have rows then.
    """

    arrays: tuple[Value, ...]
    results: tuple[int, ...]
    equations: tuple[Equation, ...]
    reads: tuple[Value, ...]
    scalars: tuple[Value, ...]
    rows: Rows | None = None
    having: frozenset[Value] = frozenset()

    @property
    def is_last(self) -> bool:
        """Whether it has the last rows, or all."""
        rows = self.rows
        return rows is None or rows.stop == self.arrays[0].aval.shape[rows.dim]

    def run(self, env: dict[Value, Any]) -> None:
        """Bind its equations, on its rows."""
        if self.rows is None:
            run(self.equations, env)
        else:
            run_rows(self.equations, env, self.rows, self.having)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """An update in pieces.

    Attributes:
      program: all of it.
      tree: structure of what it returns.
      untouched: the results that are inputs, by position.
      shared: positions of the results that need nothing of any sub-group.
      common: the equations that make these, and what more than one sub-group needs. Those of
        scalars each sub-group has besides: where the compiler joins them with what reads them
        decides about roundings.
      groups: the others.
    """

    program: Program
    tree: Any
    untouched: dict[int, Value]
    shared: tuple[int, ...]
    common: tuple[Equation, ...]
    groups: tuple[SubGroup, ...]

    @staticmethod
    def of(
        update: Callable[..., Any],
        args: Any,
        is_offloaded: Sequence[bool],
        *,
        limit: int,
        layer_dims: Sequence[int | None],
    ) -> Pieces:
        """Trace an update and cut it.

        Args:
          update: a function of arrays.
          args: shapes of its arguments, pytrees.
          is_offloaded: of each array among these.
          limit: most elements of the offloaded arrays of a sub-group; one piece that is not cut, or
            one layer, may have more.
          layer_dims: of the arrays that the first results are the next values of, the first ones of
            `args`: the dim of their layers, None if they have none.
        """
        program, tree = trace(update, *args)
        offloaded = [v for v, is_it in zip(program.inputs, is_offloaded, strict=True) if is_it]
        outputs = enumerate(program.outputs)
        inputs = frozenset(program.inputs)
        untouched = {i: v for i, v in outputs if isinstance(v, Value) and v in inputs}
        shared, pieces = _pieces(program, offloaded, untouched)
        makers = {v: eq for eq in program.equations for v in eq.outputs}
        packs = [
            ([v for arrays, _ in pack for v in arrays], [i for _, mine in pack for i in mine])
            for pack in packed(pieces, _elements, limit)
        ]
        needed = [
            frozenset(_closure(program, results, makers)[0])
            for results in (shared, *(results for _, results in packs))
        ]
        times = Counter(eq for equations in needed for eq in equations)
        once = {
            v: eq
            for v, eq in makers.items()
            if _is_scalar(eq) or (times[eq] == 1 and eq not in needed[0])
        }
        uses = Counter(v for eq in program.equations for v in eq.values)
        groups = []
        for arrays, results in packs:
            equations, reads = _closure(program, results, once)
            here = Counter(v for eq in equations for v in eq.values)
            used_once = (v for v, n in here.items() if n == 1 < uses[v])
            groups.append(
                SubGroup(
                    arrays=tuple(arrays),
                    results=tuple(results),
                    equations=tuple(equations),
                    reads=tuple(v for v in reads if v not in set(arrays)),
                    scalars=tuple(v for v in used_once if v.aval.shape == ()),
                )
            )
        readers = Counter(v for group in groups for v in group.reads)
        # What others read as it was is not written over row by row.
        dims = {
            v: None if readers[v] > 1 else dim
            for v, dim in zip(program.inputs, layer_dims, strict=False)
        }
        groups = [cut for group in groups for cut in _layers(group, dims, program, limit)]
        kept = [v for group in groups for v in group.reads if v in makers]
        kept += [a for i in shared if isinstance(a := program.outputs[i], Value)]
        return Pieces(
            program=program,
            tree=tree,
            untouched=untouched,
            shared=tuple(shared),
            common=tuple(closure(kept, makers)[0]),
            groups=tuple(groups),
        )


def _layers(
    group: SubGroup, dims: Mapping[Value, int | None], program: Program, limit: int
) -> list[SubGroup]:
    """Return a sub-group cut into layers, if it is too large and can be; else itself."""
    size, dim = _elements((list(group.arrays), [])), dims[group.arrays[0]]
    if max(group.results) >= len(dims):
        return [group]
    written = {dims[program.inputs[i]] for i in group.results}
    if size <= limit or dim is None or written.union(dims[v] for v in group.arrays) != {dim}:
        return [group]
    length = group.arrays[0].aval.shape[dim]
    having = with_rows(group.equations, {*group.arrays, *group.reads}, dim, length)
    made = [program.outputs[i] for i in group.results]
    if having is None or not having.issuperset(made):
        return [group]
    count = max(1, limit * length // size)
    return [
        dataclasses.replace(group, rows=rows, having=having) for rows in in_rows(length, count, dim)
    ]


def _is_scalar(eq: Equation) -> bool:
    return all(v.aval.shape == () for v in (*eq.values, *eq.outputs))


def _pieces(
    program: Program, offloaded: Sequence[Value], untouched: Collection[int]
) -> tuple[list[int], list[tuple[list[Value], list[int]]]]:
    """Return the results that are in no piece, and for each set of offloaded arrays that belong
    together, those and their results; by position, without those `untouched`."""
    makers = {v: eq for eq in program.equations for v in eq.outputs}
    group = {v: v for v in offloaded}  # each points on to another of its set, the last to itself

    def last(v: Value) -> Value:
        while group[v] is not v:
            v = group[v]
        return v

    needs: dict[int, list[Value]] = {}
    for i in range(len(program.outputs)):
        if i not in untouched:
            needs[i] = [v for v in _closure(program, [i], makers)[1] if v in group]
            for v in needs[i][1:]:
                group[last(v)] = last(needs[i][0])
    shared = [i for i, mine in needs.items() if not mine]
    sets: dict[Value, tuple[list[Value], list[int]]] = {}
    for v in offloaded:
        sets.setdefault(last(v), ([], []))[0].append(v)
    for i, mine in needs.items():
        if mine:
            sets[last(mine[0])][1].append(i)
    pieces = [piece for piece in sets.values() if piece[1]]
    return _joined(program, shared, pieces), pieces


def _joined(
    program: Program, shared: Sequence[int], pieces: Sequence[tuple[list[Value], list[int]]]
) -> list[int]:
    """Give a piece the results that need nothing that is offloaded but arrays that only it computes
    on the way to its own: a leaf's second moment is updated with the first one, which is offloaded.
    Apart, the compiler would round otherwise. Return the others."""
    makers = {v: eq for eq in program.equations for v in eq.outputs if v.aval.shape}
    owners: dict[Equation, set[int]] = defaultdict(set)
    for n, (_, results) in enumerate(pieces):
        for eq in _closure(program, results, makers)[0]:
            owners[eq].add(n)
    others = []
    for i in shared:
        found = {n for eq in _closure(program, [i], makers)[0] for n in owners[eq]}
        if len(found) == 1:
            pieces[found.pop()][1].append(i)
        else:
            others.append(i)
    return others


def _elements(piece: tuple[list[Value], list[int]]) -> int:
    return sum(math.prod(v.aval.shape) for v in piece[0])


def _closure(
    program: Program, results: Sequence[int], makers: dict[Value, Equation]
) -> tuple[list[Equation], list[Value]]:
    atoms: list[Atom] = [program.outputs[i] for i in results]
    return closure([a for a in atoms if isinstance(a, Value)], makers)
