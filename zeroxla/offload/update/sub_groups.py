"""`SubGroups`: cuts an optimizer's update into parts that can be computed one after another.

The update is traced, and its program says which results follow from which arrays. Results that
follow from the same offloaded arrays belong together: for most optimizers a leaf with its moments.
Such sets of arrays are packed into sub-groups. Values that several sub-groups need (a norm, a
schedule) are computed once, before them. A result that is an input (a frozen leaf) is in no
sub-group. A sub-group of stacked leaves that is too large is cut again, into layers, if these are
independent (see `rows`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zeroxla.offload.update.rows import Rows, run_rows, runs_of_rows, values_with_rows
from zeroxla.program.chunks import packed
from zeroxla.program.trace import Equation, Operand, Program, Value, closure, run, trace

Makers = Mapping[Value, Equation]
"""The equation that makes each value."""

RunEquations = Callable[[Sequence[Equation], dict[Value, Any]], None]
"""(equations, values that they read): computes the equations, and adds their values."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SubGroup:
    """The part of an update that is computed at a time.

    Attributes:
      arrays: the offloaded arrays that come to the device for it.
      results: positions of its results among the update's.
      equations: the equations that make the results, without those that are computed before.
      reads: the values that the equations need besides `arrays`: inputs that are not offloaded, and
        values that are computed before.
      scalars: the scalars that are used once here and more often in the whole update. How often a
        number is used decides whether XLA divides by it or multiplies by its reciprocal.
      rows: the rows of its arrays and results that it covers, if it is one of several that a
        sub-group was cut into; these follow each other. None means all rows.
      row_values: if there are `rows`, the values that have rows.
    """

    arrays: tuple[Value, ...]
    results: tuple[int, ...]
    equations: tuple[Equation, ...]
    reads: tuple[Value, ...]
    scalars: tuple[Value, ...]
    rows: Rows | None = None
    row_values: frozenset[Value] = frozenset()

    @property
    def is_last(self) -> bool:
        """Whether it covers the last rows, or all."""
        rows = self.rows
        return rows is None or rows.stop == self.arrays[0].aval.shape[rows.dim]

    def run(self, env: dict[Value, Any], run_whole: RunEquations = run) -> None:
        """Compute the equations, on this sub-group's rows, and add their values to `env`.

        Args:
          env: the values that they read.
          run_whole: runs the equations of a sub-group with all rows.
        """
        if self.rows is None:
            run_whole(self.equations, env)
        else:
            run_rows(self.equations, env, self.rows, self.row_values)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SubGroups:
    """An update that is cut into sub-groups.

    Attributes:
      program: the whole update.
      tree: the structure of its results.
      untouched: the results that are inputs, by position.
      shared: positions of the results that belong to no sub-group and are no inputs.
      common: the equations that are computed before the sub-groups: they make the shared results,
        and values that more than one sub-group needs. Equations of scalars are in the sub-groups
        too, because roundings depend on whether the compiler joins them with their readers.
      groups: the sub-groups, in the order in which they are computed.
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
    ) -> SubGroups:
        """Trace an update and cut it.

        Args:
          update: a function of arrays.
          args: the shapes of its arguments, as pytrees.
          is_offloaded: whether each of these arrays is offloaded.
          limit: largest number of elements that a sub-group's offloaded arrays may have together.
            Arrays that belong together and cannot be cut may exceed it, and so may a single layer.
          layer_dims: the dim of the layers in each of the first arrays of `args`, whose next values
            are the first results; None for an array without layers.
        """
        program, tree = trace(update, *args)
        offloaded = [v for v, is_it in zip(program.inputs, is_offloaded, strict=True) if is_it]
        inputs = frozenset(program.inputs)
        outputs = enumerate(program.outputs)
        untouched = {i: v for i, v in outputs if isinstance(v, Value) and v in inputs}
        shared, array_sets = _array_sets(program, offloaded, untouched)
        packs = [_united(sets) for sets in packed(array_sets, _elements, limit)]
        groups = _make_groups(program, packs, _own_makers(program, shared, packs))
        dims = _layer_dims(program, groups, layer_dims)
        groups = [cut for group in groups for cut in _layers(group, dims, program, limit)]
        return SubGroups(
            program=program,
            tree=tree,
            untouched=untouched,
            shared=tuple(shared),
            common=tuple(_common(program, shared, groups)),
            groups=tuple(groups),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _ArraySet:
    """Offloaded arrays that are updated together, and the positions of their results."""

    arrays: list[Value]
    results: list[int]


def _array_sets(
    program: Program, offloaded: Sequence[Value], untouched: Collection[int]
) -> tuple[list[int], list[_ArraySet]]:
    """Return the positions of the shared results, and the sets of arrays that belong together.

    Two arrays belong together if a result follows from both. `untouched` results are in neither.
    """
    makers = _makers(program)
    group = {v: v for v in offloaded}  # each points to another of its set, the last one to itself

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
    sets: dict[Value, _ArraySet] = {}
    for v in offloaded:
        sets.setdefault(last(v), _ArraySet([], [])).arrays.append(v)
    for i, mine in needs.items():
        if mine:
            sets[last(mine[0])].results.append(i)
    found = [array_set for array_set in sets.values() if array_set.results]
    return _join_shared(program, shared, found), found


def _join_shared(
    program: Program, shared: Sequence[int], array_sets: Sequence[_ArraySet]
) -> list[int]:
    """Give each set the shared results that use an array that only this set computes, and return
    the positions of the others.

    An example is a leaf's second moment on the device, if its first moment is offloaded: both use
    the same gradient. If they were computed apart, the compiler would round otherwise.
    """
    makers = {v: eq for v, eq in _makers(program).items() if v.aval.shape}
    owners: dict[Equation, set[int]] = defaultdict(set)
    for n, array_set in enumerate(array_sets):
        for eq in _closure(program, array_set.results, makers)[0]:
            owners[eq].add(n)
    others = []
    for i in shared:
        found = {n for eq in _closure(program, [i], makers)[0] for n in owners[eq]}
        if len(found) == 1:
            array_sets[found.pop()].results.append(i)
        else:
            others.append(i)
    return others


def _united(sets: Sequence[_ArraySet]) -> _ArraySet:
    return _ArraySet([v for x in sets for v in x.arrays], [i for x in sets for i in x.results])


def _own_makers(program: Program, shared: Sequence[int], packs: Sequence[_ArraySet]) -> Makers:
    """Return the equations that sub-groups compute themselves: scalars, and values that neither
    another sub-group nor a shared result needs."""
    makers = _makers(program)
    for_shared = frozenset(_closure(program, shared, makers)[0])
    for_groups = [frozenset(_closure(program, pack.results, makers)[0]) for pack in packs]
    times = Counter(eq for equations in (for_shared, *for_groups) for eq in equations)
    return {
        v: eq
        for v, eq in makers.items()
        if _is_scalar(eq) or (times[eq] == 1 and eq not in for_shared)
    }


def _make_groups(program: Program, packs: Sequence[_ArraySet], own: Makers) -> list[SubGroup]:
    """Return a sub-group for each pack of arrays. `own` are the equations that it may compute."""
    uses = Counter(v for eq in program.equations for v in eq.values)
    groups = []
    for pack in packs:
        equations, reads = _closure(program, pack.results, own)
        here = Counter(v for eq in equations for v in eq.values)
        used_once = (v for v, n in here.items() if n == 1 < uses[v])
        groups.append(
            SubGroup(
                arrays=tuple(pack.arrays),
                results=tuple(pack.results),
                equations=tuple(equations),
                reads=tuple(v for v in reads if v not in set(pack.arrays)),
                scalars=tuple(v for v in used_once if v.aval.shape == ()),
            )
        )
    return groups


def _layer_dims(
    program: Program, groups: Sequence[SubGroup], layer_dims: Sequence[int | None]
) -> dict[Value, int | None]:
    """Return the dim along which each input may be written layer by layer; None if it may not:
    then several sub-groups read the values from before the update."""
    readers = Counter(v for group in groups for v in group.reads)
    return {
        v: None if readers[v] > 1 else dim
        for v, dim in zip(program.inputs, layer_dims, strict=False)
    }


def _layers(
    group: SubGroup, dims: Mapping[Value, int | None], program: Program, limit: int
) -> list[SubGroup]:
    """Return a sub-group cut into layers if it is too large and can be cut; otherwise itself."""
    size, dim = _elements(group), dims[group.arrays[0]]
    if max(group.results) >= len(dims):
        return [group]
    written = {dims[program.inputs[i]] for i in group.results}
    if size <= limit or dim is None or written.union(dims[v] for v in group.arrays) != {dim}:
        return [group]
    length = group.arrays[0].aval.shape[dim]
    found = values_with_rows(group.equations, {*group.arrays, *group.reads}, dim, length)
    made = [program.outputs[i] for i in group.results]
    if found is None or not found.issuperset(made):
        return [group]
    count = max(1, limit * length // size)
    return [
        dataclasses.replace(group, rows=rows, row_values=found)
        for rows in runs_of_rows(length, count, dim)
    ]


def _common(program: Program, shared: Sequence[int], groups: Sequence[SubGroup]) -> list[Equation]:
    """Return the equations that are computed before the sub-groups: they make the values that these
    read, and the shared results."""
    makers = _makers(program)
    kept = [v for group in groups for v in group.reads if v in makers]
    kept += [a for i in shared if isinstance(a := program.outputs[i], Value)]
    return closure(kept, makers)[0]


def _makers(program: Program) -> dict[Value, Equation]:
    return {v: eq for eq in program.equations for v in eq.outputs}


def _is_scalar(eq: Equation) -> bool:
    return all(v.aval.shape == () for v in (*eq.values, *eq.outputs))


def _elements(of: _ArraySet | SubGroup) -> int:
    return sum(math.prod(v.aval.shape) for v in of.arrays)


def _closure(
    program: Program, results: Sequence[int], makers: Makers
) -> tuple[list[Equation], list[Value]]:
    """Return the equations that results, given by position, need, and the values they start
    from."""
    operands: list[Operand] = [program.outputs[i] for i in results]
    return closure([a for a in operands if isinstance(a, Value)], makers)
